"""What is known of a method before anything is measured, and what the rows say about the same.

The yaml of a method or a store carries a node `traits:`

    traits: {shrinks: tokens, retraining: false, history: lost, bounded: true, typical: prompt / budget}

and whoever adds a method says it there: the report itself knows none by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml  # type: ignore[import-untyped]

from kvbench.results.row import Row


@dataclass(frozen=True)
class Traits:
    """None: nobody has said, and the rows do not tell."""

    shrinks: str | None = None
    retraining: bool | None = None
    history: str | None = None  # kept | lost
    bounded: bool | None = None  # the cache stops growing, however long the text
    typical: str | None = None


def traits_of(row: Row) -> Traits:
    """What the keep rule's yaml and the store's say together."""
    known = [node for node in (_node("method", row.method), _node("store", row.store)) if node]
    if not known:
        return Traits()
    bounded = any(bool(node.get("bounded")) for node in known)
    return Traits(
        shrinks=_joined(known, "shrinks"),
        retraining=any(bool(node.get("retraining")) for node in known),
        history="lost" if any(node.get("history") == "lost" for node in known) else "kept",
        # A rule that bounds the tokens bounds the bytes, whatever holds them; unless it was told to append.
        bounded=bounded if "decode" not in (row.knobs or "") else '"evict"' in (row.knobs or ""),
        typical=_joined(known, "typical"),
    )


def measured_bounded(row: Row, kept: Row | None) -> bool | None:
    """Whether the tokens held after decoding were no more than the budget, itself less than the context."""
    budget = row.budget
    if kept is None or kept.value is None or kept.context is None:
        return None
    if budget is None or budget < 1:  # nothing is given up, or a share that grows with the prompt
        return False
    return kept.value <= budget < kept.context if kept.context > budget else None


def _joined(nodes: list[Mapping[str, Any]], key: str) -> str | None:
    return ", ".join(str(node[key]) for node in nodes if node.get(key)) or None


@functools.cache
def _node(group: str, name: str | None) -> Mapping[str, Any]:
    """The `traits:` of conf/GROUP/NAME.yaml; empty where the file is not ours or says nothing."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        return {}
    file = resources.files("kvbench.conf").joinpath(group, f"{name}.yaml")
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not isinstance(content, dict):
        return {}
    inner = content.get(group)  # a yaml with `# @package _global_` has its own node one level down
    node = content.get("traits") or (inner.get("traits") if isinstance(inner, dict) else None)
    return node if isinstance(node, dict) else {}
