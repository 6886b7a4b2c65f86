"""The NLL of each window above the full cache's, for every method, from samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, comparison_key, config_of, is_baseline
from kvbench.results.row import KNOBS, Row
from kvbench.results.run_files import read_metrics, sample_records

COLUMNS = tuple(name for name in KNOBS if name not in ("method", "store", "knobs"))
NO_KNOB = ("seed",)
"""Recorded among a sample's knobs, but a setting of the row."""


@dataclass(frozen=True)
class WindowSample:
    """One window under one method. row: the method with its knobs."""

    row: Row
    window: str  # hash of its tokens: the same for the same text in every run
    difference: float  # NLL above the full cache's, nats a token
    kl: float | None = None  # from the full cache to the method, nats a token


WindowKey = tuple[Any, ...]
"""Model and device, method with its knobs, context and protocol."""


@dataclass(frozen=True)
class MethodWindows:
    """The windows of one method. row: the method with its knobs. differences: by window, NLL minus the full cache's."""

    row: Row
    differences: dict[str, float] = field(default_factory=dict)


def window_key(row: Row) -> WindowKey:
    """Equal for a row of perplexity and the samples of the same method, model, device, context and protocol."""
    return (*comparison_key(row, across_measures=True), *config_of(row), row.context, row.protocol)


def by_method(samples: Iterable[WindowSample]) -> dict[WindowKey, MethodWindows]:
    """The windows of each method."""
    found: dict[WindowKey, MethodWindows] = {}
    for sample in samples:
        method = found.setdefault(window_key(sample.row), MethodWindows(sample.row))
        method.differences[sample.window] = sample.difference
    return found


def read_samples(runs: Iterable[Path]) -> list[WindowSample]:
    """Paired differences of all perplexity windows. Of a window measured twice the later one counts."""
    found: dict[tuple[Any, ...], WindowSample] = {}
    for run in runs:
        records = sample_records(run)
        setting = _setting(run) if records else {}
        for record in records:
            for sample in _differences(record, setting):
                row = sample.row
                key = (comparison_key(row), config_of(row), row.context, row.protocol, sample.window)
                found[key] = sample
    return list(found.values())


def _setting(run: Path) -> dict[str, Any]:
    """Model and device of a run, which samples do not repeat."""
    metrics = read_metrics(run)
    first = [] if metrics is None else metrics.select(list(MODEL_AND_DEVICE)).slice(0, 1).to_pylist()
    return first[0] if first else {}


def _differences(record: Mapping[str, Any], setting: Mapping[str, Any]) -> list[WindowSample]:
    if record.get("measure") != "perplexity" or not isinstance(record.get("context"), int | None):
        return []
    if not isinstance(record.get("protocol"), str | None):
        return []
    methods = record.get("methods")
    entries = [entry for entry in methods if _is_entry(entry)] if isinstance(methods, list) else []
    scored = [(_row(entry, record, setting), entry) for entry in entries if _finite(entry.get("nll"))]
    base = next((float(entry["nll"]) for row, entry in scored if is_baseline(row)), None)
    if base is None:
        return []
    window = str(record.get("sha256"))
    return [
        WindowSample(row, window, float(entry["nll"]) - base, _number(entry.get("kl")))
        for row, entry in scored
        if not is_baseline(row)
    ]


def _number(value: Any) -> float | None:
    return float(value) if _finite(value) else None


def _is_entry(entry: Any) -> bool:
    """Whether an entry of a sample names a method, a store and plain knobs."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("method"), str):
        return False
    knobs = entry.get("knobs")
    plain = isinstance(knobs, Mapping | None) and not any(isinstance(v, list | dict) for v in (knobs or {}).values())
    return plain and isinstance(entry.get("store"), str | None)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _row(entry: Mapping[str, Any], record: Mapping[str, Any], setting: Mapping[str, Any]) -> Row:
    recorded = entry.get("knobs")
    known = recorded.items() if isinstance(recorded, Mapping) else ()
    knobs: dict[str, Any] = {name: value for name, value in known if value is not None}  # as rows record them
    columns = {name: knobs.pop(name) for name in COLUMNS if name in knobs}
    rest: Sequence[str] = sorted(name for name in knobs if name not in NO_KNOB)
    budget = columns.get("budget")
    columns["budget"] = float(budget) if isinstance(budget, int | float) else None
    columns["knobs"] = json.dumps({name: knobs[name] for name in rest}) if rest else None
    return Row(
        method=entry.get("method"),
        store=entry.get("store"),
        context=record.get("context"),
        protocol=record.get("protocol"),
        **setting,
        **columns,
    )
