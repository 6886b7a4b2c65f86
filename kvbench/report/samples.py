"""What each window scored under each method, from samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.report.names import is_baseline
from kvbench.results import SAMPLES
from kvbench.rows import KNOBS, Row

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
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            for sample in _differences(_object(line)):
                known = tuple(getattr(sample.row, name) for name in KNOBS)
                found[*known, sample.row.context, sample.window] = sample
    return list(found.values())


def _differences(record: Mapping[str, Any]) -> list[Sample]:
    if record.get("measure") != "perplexity":
        return []
    scored = [(_row(entry, record), entry.get("nll")) for entry in record.get("methods") or []]
    base = next((nll for row, nll in scored if is_baseline(row)), None)
    if base is None:
        return []
    window = str(record.get("sha256"))
    return [Sample(row, window, nll - base) for row, nll in scored if nll is not None and not is_baseline(row)]


def _row(entry: Mapping[str, Any], record: Mapping[str, Any]) -> Row:
    knobs: dict[str, Any] = dict(entry.get("knobs") or {})
    columns = {name: knobs.pop(name) for name in COLUMNS if name in knobs}
    rest: Sequence[str] = sorted(name for name in knobs if name not in IGNORED)
    if columns.get("budget") is not None:
        columns["budget"] = float(columns["budget"])
    columns["knobs"] = json.dumps({name: knobs[name] for name in rest}) if rest else None
    return Row(method=entry.get("method"), store=entry.get("store"), context=record.get("context"), **columns)


def _object(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:  # the last line of a run that is being written
        return {}
    return content if isinstance(content, dict) else {}
