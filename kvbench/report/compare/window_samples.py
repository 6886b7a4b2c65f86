"""The NLL of each window above the full cache's, for every method, from samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, comparison_key, config_of, is_baseline
from kvbench.results.folder import METRICS, SAMPLES
from kvbench.results.row import KNOBS, Row

COLUMNS = tuple(name for name in KNOBS if name not in ("method", "store", "knobs"))
NO_KNOB = ("seed",)
"""Recorded among a sample's knobs, but a setting of the row."""


@dataclass(frozen=True)
class WindowSample:
    """One window under one method. row: the method with its knobs."""

    row: Row
    window: str  # hash of its tokens: the same for the same text in every run
    difference: float  # NLL above the full cache's, nats a token


def read_samples(runs: Iterable[Path]) -> list[WindowSample]:
    """Paired differences of all perplexity windows. Of a window measured twice the later one counts."""
    found: dict[tuple[Any, ...], WindowSample] = {}
    for run in runs:
        file = run / SAMPLES
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        setting = _setting(run) if lines else {}
        for line in lines:
            for sample in _differences(_json_object(line), setting):
                key = (comparison_key(sample.row), config_of(sample.row), sample.row.context, sample.window)
                found[key] = sample
    return list(found.values())


def _setting(run: Path) -> dict[str, Any]:
    """Model and device of a run, which samples do not repeat."""
    if not (run / METRICS).is_file():
        return {}
    file = pq.ParquetFile(run / METRICS)
    known = [name for name in MODEL_AND_DEVICE if name in file.schema_arrow.names]
    first = file.read(columns=known).slice(0, 1).to_pylist()
    return first[0] if first else {}


def _differences(record: Mapping[str, Any], setting: Mapping[str, Any]) -> list[WindowSample]:
    if record.get("measure") != "perplexity":
        return []
    methods = record.get("methods")
    entries = [entry for entry in methods if isinstance(entry, Mapping)] if isinstance(methods, list) else []
    scored = [(_row(entry, record, setting), float(entry["nll"])) for entry in entries if _finite(entry.get("nll"))]
    base = next((nll for row, nll in scored if is_baseline(row)), None)
    if base is None:
        return []
    window = str(record.get("sha256"))
    return [WindowSample(row, window, nll - base) for row, nll in scored if not is_baseline(row)]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _row(entry: Mapping[str, Any], record: Mapping[str, Any], setting: Mapping[str, Any]) -> Row:
    recorded = entry.get("knobs")
    knobs: dict[str, Any] = dict(recorded) if isinstance(recorded, Mapping) else {}
    columns = {name: knobs.pop(name) for name in COLUMNS if name in knobs}
    rest: Sequence[str] = sorted(name for name in knobs if name not in NO_KNOB)
    budget = columns.get("budget")
    columns["budget"] = float(budget) if isinstance(budget, int | float) else None
    columns["knobs"] = json.dumps({name: knobs[name] for name in rest}) if rest else None
    return Row(
        method=entry.get("method"), store=entry.get("store"), context=record.get("context"), **setting, **columns
    )


def _json_object(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:  # the last line of a run that is still being written
        return {}
    return content if isinstance(content, dict) else {}
