"""The measures that kvbench ships, from its config: their order, their default settings and their headlines."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module, resources
from typing import Any

import yaml  # type: ignore[import-untyped]

from kvbench.results.headline import Headline


@functools.cache
def shipped_config() -> Mapping[str, Any]:
    """conf/config.yaml, in which knobs are root keys."""
    return _yaml("config.yaml")


@functools.cache
def shipped_measures() -> tuple[str, ...]:
    """Names of the measures: those that run by default in their order, then the others."""
    config = shipped_config()
    nodes = [name for name, node in config.items() if isinstance(node, Mapping) and "_target_" in node]
    folder = resources.files("kvbench.conf").joinpath("measures")
    files = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
    return tuple(dict.fromkeys([*(config.get("measure") or ()), *nodes, *names]))


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


def _yaml(*path: str) -> Mapping[str, Any]:
    file = resources.files("kvbench.conf").joinpath(*path)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return content if isinstance(content, dict) else {}
