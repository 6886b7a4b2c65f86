"""What a compared method is called, and which of its knobs have to be told: one place for all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.results.row import KNOBS, Row

# What makes two rows parts of the same line of a comparison; `depth`, `position`, `metric` tell them apart inside it.
IDENTITY = (
    "model",
    "revision",
    "arch",
    "kv_heads",
    "converted",
    *KNOBS,
    "protocol",
    "question",
    "dataset",
    "context",
    "batch",
    "dtype",
    "device",
    "kernel",
    "threads",
    "seed",
    "stride",
    "bos",
)
Config = tuple[Any, ...]  # values of KNOBS
TRAINED, REPEATED, POOLED, RANDOM = "trained", "heads repeated", "heads mean-pooled", "random"


def config_of(row: Row) -> Config:
    """The method with all its knobs: what the report compares."""
    return tuple(getattr(row, name) for name in KNOBS)


def is_baseline(row: Row) -> bool:
    """True for the uncompressed cache that everything is held against."""
    return row.method == "full" and row.store in (None, "full", "dense")


def layout_of(row: Row) -> str | None:
    """What is cached of multi-head latent attention: absorbed, latent or expand; None for a model without it."""
    layout = _object(row.knobs).get("mla")
    return None if layout is None else str(layout)


def weights_of(row: Row) -> str:
    """TRAINED, REPEATED, POOLED or RANDOM: where a model's weights are from, as far as it bears on its quality."""
    note = row.note or ""
    if "random weights" in note:
        return RANDOM
    if not row.converted:
        return TRAINED
    return REPEATED if "same logits" in note else POOLED


def display_name(row: Row) -> str:
    """`h2o` where the store is dense or the method's own (kivi in kivi4), `h2o+int4` otherwise."""
    method, store = row.method or "?", row.store or "dense"
    if store == "dense" or method.startswith(store):
        return method
    if store.startswith(method):  # method=kivi with the store kivi4: the longer name says more
        return store
    return f"{method}+{store}"


def knob_text(name: str, value: Any) -> str:
    """A knob's value as it stands in labels and columns: budgets 256 or 25%, booleans in words."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "budget":
        return f"{value:.10g}" if value >= 1 else f"{100 * value:.4g}%"
    return f"{value:g}" if isinstance(value, float) else str(value)


def varying_knobs(rows: Iterable[Row]) -> tuple[str, ...]:
    """Knobs that take several values under one display name, plus `budget` if it differs anywhere.

    Bits that differ only because kivi4 and kivi2 are different methods are told by the name already.
    """
    configs = {config_of(row): row for row in rows}
    names = [name for name in KNOBS if name not in ("method", "store")]
    seen: dict[tuple[str, str], set[Any]] = {}
    for row in configs.values():
        for knob in names:
            seen.setdefault((knob, display_name(row)), set()).add(getattr(row, knob))
    varying = {knob for (knob, _), values in seen.items() if len(values) > 1}
    budgets = {row.budget for row in configs.values() if row.budget is not None}
    return tuple(name for name in names if name in varying or (name == "budget" and len(budgets) > 1))


def varying_json(rows: Iterable[Row]) -> dict[Config, str]:
    """For each config the keys of `knobs` that differ under its display name, as `kernel=7, pool=max`."""
    parsed = {config_of(row): (display_name(row), _object(row.knobs)) for row in rows}
    values: dict[tuple[str, str], set[str]] = {}
    names = {name for name, _ in parsed.values()}
    keys = sorted({key for _, knobs in parsed.values() for key in knobs})
    for name, knobs in parsed.values():
        for key in keys:
            values.setdefault((name, key), set()).add(json.dumps(knobs.get(key), sort_keys=True))
    told = {name: [key for key in keys if len(values[name, key]) > 1] for name in names}
    return {
        config: ", ".join(f"{key}={knobs[key]}" for key in told[name] if key in knobs)
        for config, (name, knobs) in parsed.items()
    }


def labels(rows: Sequence[Row]) -> dict[Config, str]:
    """A short label for every config: the display name, then the knobs that vary under it (`h2o 256`)."""
    shapes = {
        "budget": "{}",
        "bits": "{} bit",
        "k_bits": "k{}",
        "v_bits": "v{}",
        "group": "G{}",
        "residual": "R{}",
        "sinks": "{} sinks",
        "window": "w{}",
        "variant": "{}",
        "knobs": "{}",
    }
    by_name: dict[str, dict[Config, Row]] = {}
    for row in rows:
        by_name.setdefault(display_name(row), {})[config_of(row)] = row
    result: dict[Config, str] = {}
    for name, configs in by_name.items():
        told = [knob for knob in varying_knobs(configs.values()) if knob != "knobs"]
        extra = varying_json(configs.values())
        for config, row in configs.items():
            known = [knob for knob in told if getattr(row, knob) is not None]
            parts = [shapes[knob].format(knob_text(knob, getattr(row, knob))) for knob in known]
            result[config] = f"{name} {', '.join(filter(None, [*parts, extra[config]]))}".strip()
    return result


def _object(text: str | None) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
    except ValueError:
        content = {"knobs": text}
    return content if isinstance(content, dict) else {"knobs": content}
