"""What the yaml files of kvbench declare: measures with their settings and headlines, and traits of methods.

The yaml of a method or a store carries a node `traits:`

    traits: {shrinks: tokens, retraining: false, history: lost, bounded: true, typical: prompt / budget}

A rule that evicts in blocks, and so holds more than the budget between evictions, adds `blocks: true`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from typing import Any

import yaml  # type: ignore[import-untyped]

from kvbench.report.compare.comparison import other_knobs
from kvbench.results.headline import Headline
from kvbench.results.row import Row


@functools.cache
def shipped_config() -> Mapping[str, Any]:
    """conf/config.yaml, in which knobs are root keys."""
    return _yaml("config.yaml")


@functools.cache
def shipped_measures() -> tuple[str, ...]:
    """Names of the measures: those that run by default in their order, then the others."""
    config = shipped_config()
    nodes = [name for name, node in config.items() if isinstance(node, Mapping) and "_target_" in node]
    return tuple(dict.fromkeys([*(config.get("measure") or ()), *nodes, *shipped_names("measures")]))


@functools.cache
def shipped_names(group: str) -> tuple[str, ...]:
    """Names of the files of a group of the configuration, in alphabetical order: `model`, `data`."""
    folder = resources.files("kvbench.conf").joinpath(group)
    files = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    return tuple(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


@functools.cache
def shipped_file(group: str, name: str) -> Mapping[str, Any]:
    """The content of a file of a group of the configuration; {} where there is none."""
    return _yaml(group, f"{name}.yaml")


@functools.cache
def shipped_settings(measure: str) -> Mapping[str, Any]:
    """The default settings of a measure; {} if kvbench does not ship it."""
    if measure not in shipped_measures():
        return {}
    node = shipped_config().get(measure) or _yaml("measures", f"{measure}.yaml")
    return node if isinstance(node, Mapping) else {}


@functools.cache
def shipped_headlines(measure: str) -> tuple[Headline, ...]:
    """The headlines that the class of a measure declares; () if kvbench does not ship it. Imports no torch."""
    module, _, name = str(shipped_settings(measure).get("_target_", "")).rpartition(".")
    return tuple(getattr(import_module(module), name).headlines) if module else ()


@dataclass(frozen=True)
class Traits:
    """None: not declared and not measurable."""

    shrinks: str | None = None
    retraining: bool | None = None
    history: str | None = None  # kept | lost
    bounded: bool | None = None  # the cache stops growing, however long the text
    typical: str | None = None


def traits_of(row: Row) -> Traits:
    """What the yaml files of the keep rule and of the store declare together."""
    known = [node for node in (_node("method", row.method), _node("store", row.store)) if node]
    if not known:
        return Traits()
    decode = other_knobs(row).get("decode")
    # A rule that bounds the tokens bounds the bytes in every store, unless decode=append lets the cache grow.
    bounded = any(bool(node.get("bounded")) for node in known) if decode is None else decode == "evict"
    return Traits(
        shrinks=_joined(known, "shrinks"),
        retraining=any(bool(node.get("retraining")) for node in known),
        history="lost" if any(node.get("history") == "lost" for node in known) else "kept",
        bounded=bounded,
        typical=_joined(known, "typical"),
    )


def shrinks(group: str, name: str | None) -> str | None:
    """What the yaml of a keep rule (group `method`) or of a store (`store`) declares to shrink: `tokens`, `bits`."""
    found = _node(group, name).get("shrinks")
    return None if found is None else str(found)


def measured_bounded(row: Row, kept: Row | None) -> bool | None:
    """Whether at most `budget` tokens were held after decoding, with a budget below the context; None if unknown."""
    budget = row.budget
    if kept is None or kept.value is None or kept.context is None:
        return None
    if budget is None or budget < 1:  # nothing is evicted, or the budget grows with the prompt
        return False
    if kept.value > budget and _node("method", row.method).get("blocks"):
        return None
    return kept.value <= budget < kept.context if kept.context > budget else None


def _joined(nodes: list[Mapping[str, Any]], key: str) -> str | None:
    return ", ".join(str(node[key]) for node in nodes if node.get(key)) or None


@functools.cache
def _node(group: str, name: str | None) -> Mapping[str, Any]:
    """The `traits:` of conf/GROUP/NAME.yaml; empty where there is no such file or no such node."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        return {}
    content = _yaml(group, f"{name}.yaml")
    inner = content.get(group)  # a yaml with `# @package _global_` has its own node one level down
    node = content.get("traits") or (inner.get("traits") if isinstance(inner, dict) else None)
    return node if isinstance(node, dict) else {}


def _yaml(*path: str) -> Mapping[str, Any]:
    file = resources.files("kvbench.conf").joinpath(*path)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return content if isinstance(content, dict) else {}
