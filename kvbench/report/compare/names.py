"""Names of compared methods, models and knobs, as tables, figures and sentences show them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvbench.report.compare.comparison import Config, config_of, other_knobs, sees_future
from kvbench.results.row import KNOBS, Row

LABEL_FORMATS = {
    "budget": "{}",
    "bits": "{} bit",
    "k_bits": "k{}",
    "v_bits": "v{}",
    "group": "G{}",
    "residual": "R{}",
    "sinks": "{} sinks",
    "window": "w{}",
    "variant": "{}",
    "prefill_chunk": "prefill by {}",
}
"""How a knob's value is written in a label; knobs that are not listed here as `name=value`."""


SEES_FUTURE = "sees the future"


def display_name(row: Row) -> str:
    """`h2o` where the store is dense or the method's own (kivi in kivi4), `h2o+int4` otherwise.

    A method that sees the future says so: `hindsight (sees the future)`.
    """
    name = _name(row)
    return f"{name} ({SEES_FUTURE})" if sees_future(row) else name


def _name(row: Row) -> str:
    method, store = row.method or "?", row.store or "dense"
    if store == "dense" or method.startswith(store):
        return method
    if store.startswith(method):  # method=kivi with the store kivi4: the longer name says more
        return store
    return f"{method}+{store}"


def knob_text(name: str, value: Any) -> str:
    """A knob's value as labels and columns show it: budgets as 256 or 25%, booleans as yes or no."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "budget":
        return f"{value:.10g}" if value >= 1 else f"{100 * value:.4g}%"
    return f"{value:g}" if isinstance(value, float) else str(value)


def varying_knobs(rows: Iterable[Row]) -> tuple[str, ...]:
    """Knobs that take several values under one display name, and `budget` if it takes several values anywhere.

    Bits of kivi4 and kivi2 are not among them: the names already differ.
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


def varying_other_knobs(rows: Iterable[Row], skip: Collection[str] = ()) -> dict[Config, str]:
    """For each config the keys of `knobs` that differ under its display name, as `kernel=7, pool=max`.

    skip: keys that are shown elsewhere.
    """
    parsed = {config_of(row): (display_name(row), other_knobs(row)) for row in rows}
    values: dict[tuple[str, str], set[str]] = {}
    names = {name for name, _ in parsed.values()}
    keys = sorted({key for _, knobs in parsed.values() for key in knobs if key not in skip})
    for name, knobs in parsed.values():
        for key in keys:
            values.setdefault((name, key), set()).add(json.dumps(knobs.get(key), sort_keys=True))
    varying = {name: [key for key in keys if len(values[name, key]) > 1] for name in names}
    return {
        config: ", ".join(f"{key}={knobs[key]}" for key in varying[name] if key in knobs)
        for config, (name, knobs) in parsed.items()
    }


def labels(rows: Sequence[Row]) -> dict[Config, str]:
    """A short label for every config: the display name, then the knobs that vary under it (`h2o 256`).

    Of a method that sees the future: `hindsight 256 (sees the future)`.
    """
    by_name: dict[str, dict[Config, Row]] = {}
    suffix = f" ({SEES_FUTURE})"
    for row in rows:
        by_name.setdefault(display_name(row), {})[config_of(row)] = row
    result: dict[Config, str] = {}
    for name, configs in by_name.items():
        varying = [knob for knob in varying_knobs(configs.values()) if knob != "knobs"]
        extra = varying_other_knobs(configs.values())
        for config, row in configs.items():
            known = [knob for knob in varying if getattr(row, knob) is not None and not _repeats_bits(knob, row)]
            formats = (LABEL_FORMATS.get(knob, f"{knob}={{}}") for knob in known)
            parts = [
                form.format(knob_text(knob, getattr(row, knob))) for knob, form in zip(known, formats, strict=True)
            ]
            label = f"{name.removesuffix(suffix)} {', '.join(filter(None, [*parts, extra[config]]))}".strip()
            result[config] = f"{label}{suffix}" if name.endswith(suffix) else label
    return result


def _repeats_bits(knob: str, row: Row) -> bool:
    """Keys or values have as many bits as the store, whose bits the label names."""
    return knob in ("k_bits", "v_bits") and getattr(row, knob) == row.bits


def short_model(model: str | None, among: Iterable[str | None] = ()) -> str:
    """`HuggingFaceTB/SmolLM2-135M` -> `SmolLM2-135M`; a longer part of the name where one of `among` ends the same."""
    parts = (model or "?").rstrip("/").split("/")
    others = [f"/{other}".rstrip("/") for other in among if other and other != model]
    tails = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next((tail for tail in tails if not any(other.endswith(f"/{tail}") for other in others)), "/".join(parts))


def heads_text(heads: int | None) -> str:
    """`9 KV heads`"""
    return f"{heads if heads is not None else '?'} KV head{'' if heads == 1 else 's'}"


def name_list(names: Sequence[str], most: int = 6) -> str:
    """`a, b, c and 4 more`"""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
