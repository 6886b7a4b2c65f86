"""What each window scored under each method, from samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kvbench.report.candidates import GROUP
from kvbench.report.names import is_baseline
from kvbench.results.row import KNOBS, Row
from kvbench.results.run_files import METRICS, SAMPLES

COLUMNS = tuple(name for name in KNOBS if name not in ("method", "store", "knobs"))
IGNORED = ("seed",)  # a column of the row, not a knob


@dataclass(frozen=True)
class Sample:
    """One window under one method. row: the method with its knobs."""

    row: Row
    window: str  # the hash of its tokens, so that runs of one text share it
    difference: float  # NLL above the full cache's, nats a token


def read_samples(runs: Iterable[Path]) -> list[Sample]:
    """Paired differences of all perplexity windows; of a window measured twice the later one counts."""
    found: dict[tuple[Any, ...], Sample] = {}
    for run in runs:
        file = run / SAMPLES
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        setting = _setting(run) if lines else {}
        for line in lines:
            for sample in _differences(_object(line), setting):
                known = tuple(getattr(sample.row, name) for name in (*GROUP, *KNOBS, "context"))
                found[*known, sample.window] = sample
    return list(found.values())


def _setting(run: Path) -> dict[str, Any]:
    """What the rows of a run say of its model and machine, which samples do not repeat."""
    if not (run / METRICS).is_file():
        return {}
    file = pq.ParquetFile(run / METRICS)
    first = file.read(columns=[name for name in GROUP if name in file.schema_arrow.names]).slice(0, 1).to_pylist()
    return first[0] if first else {}


def _differences(record: Mapping[str, Any], setting: Mapping[str, Any]) -> list[Sample]:
    if record.get("measure") != "perplexity":
        return []
    methods = record.get("methods")
    entries = [entry for entry in methods if isinstance(entry, Mapping)] if isinstance(methods, list) else []
    scored = [(_row(entry, record, setting), float(entry["nll"])) for entry in entries if _finite(entry.get("nll"))]
    base = next((nll for row, nll in scored if is_baseline(row)), None)
    if base is None:
        return []
    window = str(record.get("sha256"))
    return [Sample(row, window, nll - base) for row, nll in scored if not is_baseline(row)]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _row(entry: Mapping[str, Any], record: Mapping[str, Any], setting: Mapping[str, Any]) -> Row:
    told = entry.get("knobs")
    knobs: dict[str, Any] = dict(told) if isinstance(told, Mapping) else {}
    columns = {name: knobs.pop(name) for name in COLUMNS if name in knobs}
    rest: Sequence[str] = sorted(name for name in knobs if name not in IGNORED)
    budget = columns.get("budget")
    columns["budget"] = float(budget) if isinstance(budget, int | float) else None
    columns["knobs"] = json.dumps({name: knobs[name] for name in rest}) if rest else None
    return Row(
        method=entry.get("method"), store=entry.get("store"), context=record.get("context"), **setting, **columns
    )


def _object(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:  # the last line of a run that is being written
        return {}
    return content if isinstance(content, dict) else {}
