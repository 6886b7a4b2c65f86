"""What a run folder claims: its rows, its samples, its settings, and the methods that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.results.loading import find_runs
from kvbench.results.recorded_config import read_config
from kvbench.results.row import KNOBS, Row, rows_of
from kvbench.results.run_files import CONFIG, METRICS, read_provenance, read_run, sample_records
from kvbench.results.verification import content_hash

Claim = tuple[str, str, str]
"""A method as rows and samples name it: name, store, and its knobs as JSON."""


@dataclass(frozen=True)
class Recorded:
    """A run folder as it was read. content: its hash, taken before anything was read. missing: rows that status.json
    counts and that are not there."""

    run: Path
    content: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    rows: list[Row]
    samples: list[dict[str, Any]]
    missing: int

    @property
    def claims(self) -> list[Claim]:
        """The methods of rows and samples, each form once."""
        of_samples = [claim_of_entry(entry) for sample in self.samples for entry in entries_of(sample)]
        return list(dict.fromkeys([*map(claim_of_row, self.rows), *of_samples]))


def read_recorded(path: Path) -> Recorded:
    """The run folder at `path`. Raises UserError, one line, for what is no finished run folder with settings."""
    runs = find_runs(path)
    if len(runs) > 1:
        raise UserError(f"{str(path)!r} holds {len(runs)} run folders; give one, for example {str(runs[0])!r}")
    run, content = runs[0], content_hash(runs[0])
    files = read_run(run)
    if files.table is None or not files.found:
        raise UserError(f"{str(run)!r} has no rows to verify in its {METRICS}")
    if files.status["status"] == "running":
        raise UserError(f"{str(run)!r} is still running; type the same command when it has ended")
    config = read_config(run)
    missing = [key for key in ("measure", "methods", "model", "data") if not config.get(key)]
    if missing:
        raise UserError(
            f"{str(run / CONFIG)!r} names no {missing[0]}; only folders of python -m kvbench can be verified"
        )
    rows = [row for row in rows_of(files.frame(range(files.found))) if row.metric is not None and row.method]
    return Recorded(run, content, config, read_provenance(run), rows, sample_records(run), files.promised - files.found)


def entries_of(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The methods' entries of a line of samples.jsonl."""
    found = sample.get("methods")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def claim_of_row(row: Row) -> Claim:
    knobs = {name: getattr(row, name) for name in KNOBS if name not in ("method", "store", "knobs")}
    return _claim(row.method, row.store, knobs | json.loads(row.knobs or "{}"))


def claim_of_entry(entry: Mapping[str, Any]) -> Claim:
    knobs = entry.get("knobs")
    return _claim(entry.get("method"), entry.get("store"), knobs if isinstance(knobs, dict) else {})


def _claim(method: Any, store: Any, knobs: Mapping[str, Any]) -> Claim:
    given = {key: _plain(value) for key, value in knobs.items() if value is not None}
    return str(method), str(store or "dense"), json.dumps(given, sort_keys=True)


def _plain(value: Any) -> Any:
    """256.0, as a budget stands in its column, as 256."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
