"""Writing a run folder. Each of its files is complete at any moment.

`metrics.parquet` holds one measured number a row (`kvbench.results.row.Row`), with every setting it depends on.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml  # type: ignore[import-untyped]

from kvbench.errors import UserError
from kvbench.files import plain, to_json, write_atomic
from kvbench.results.claims import this_process
from kvbench.results.kept_tokens import KEPT, Kept, to_table
from kvbench.results.leftovers import remove_leftovers
from kvbench.results.row import KNOBS, Row, table_of
from kvbench.results.run_files import CONFIG, METRICS, PROVENANCE, RUN_STATUSES, SAMPLES, STATUS


class RunFolder:
    """One run on disk: `results/<time>_<label>_<8 hex>` with the five files of a run, each complete at any moment.

    Make one with `RunFolder.create`. Call `update_cells` whenever cells were measured (or `add` for rows that belong to
    no cell) and `finish` once. Each call rewrites whole files atomically, so a report can be built at any moment. A row
    counts once status.json counts it: status.json lists the cells with their status and rows and is written last.
    """

    def __init__(self, path: Path, status: dict[str, Any]) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._kept: list[pa.Table] = []
        self._status = status

    @classmethod
    def create(
        cls,
        results_dir: str | Path,
        label: str,
        config: Mapping[str, Any],
        provenance: Mapping[str, Any],
        key: str | None = None,
        cells: Iterable[Mapping[str, Any]] = (),
    ) -> RunFolder:
        """Make the folder with config.yaml, provenance.json and status.json ("running") in it.

        `config` is the resolved configuration, `provenance` what `kvbench.results.provenance.collect` returns, `key`
        the run's `resume_key`, `cells` what is to be measured (`Cell.record`). Removes old leftovers of killed
        processes from `results_dir`. Raises UserError if `results_dir` cannot be created or written.
        """
        check_writable(results_dir)
        results = Path(results_dir)
        results.mkdir(parents=True, exist_ok=True)
        remove_leftovers(results)
        now = datetime.now(UTC)
        status: dict[str, Any] = {
            "status": "running",
            "started": now.isoformat(timespec="seconds"),
            "finished": None,
            "pid": os.getpid(),
            "owner": this_process(),
            "cells_done": 0,
            "error": None,
            "note": None,
            "key": key,
        }
        if cells := [{**cell, "status": "waiting"} for cell in cells]:
            status |= {"rows": 0, "cells": cells}
        suffix = secrets.token_hex(4)
        # Filled under a hidden name and renamed, so that a run folder is never seen without its files.
        hidden = results / f".new_{suffix}"
        path = results / f"{now.astimezone():%Y-%m-%d_%H%M%S}_{clean_label(label)}_{suffix}"
        head = f"# resume key: {key}\n" if key else ""
        try:
            hidden.mkdir()
            write_atomic(hidden / CONFIG, head + yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
            write_atomic(hidden / PROVENANCE, to_json(provenance))
            write_atomic(hidden / STATUS, to_json(status))
            hidden.rename(path)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return cls(path, status)

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows and rewrite metrics.parquet. Rows without `run` get this folder's name."""
        new = self._write_rows(rows)
        cells = {tuple(getattr(row, name) for name in ("model", *KNOBS, "measure")) for row in [*self.rows, *new]}
        self._update(cells_done=len(cells), rows=len(self.rows) + len(new))
        self.rows.extend(new)

    def update_cells(self, outcomes: Mapping[str, tuple[Sequence[Row], Mapping[str, Any]]]) -> None:
        """Append the rows of cells and set fields of their records; a reader sees all of it or nothing.

        outcomes: for each cell's id its new rows and the fields of its record (`status`, `note`, `seconds`).
        """
        rows: list[Row] = []
        changes: dict[str, dict[str, Any]] = {}
        for cell, (own, fields_) in outcomes.items():
            start = len(self.rows) + len(rows)
            rows += own
            changes[cell] = {**fields_, **({"rows": [start, start + len(own)]} if own else {})}
        new = self._write_rows(rows) if rows else []
        cells = [{**cell, **changes.get(cell["id"], {})} for cell in self.cells]
        done = sum(cell["status"] in ("ok", "oom") for cell in cells)
        self._update(cells=cells, cells_done=done, rows=len(self.rows) + len(new))
        self.rows.extend(new)

    @property
    def cells(self) -> list[dict[str, Any]]:
        """The records of the cells, as status.json has them."""
        cells: list[dict[str, Any]] = self._status.get("cells", [])
        return cells

    def _write_rows(self, rows: Iterable[Row]) -> list[Row]:
        new = [row if row.run is not None else replace(row, run=self.path.name) for row in rows]
        table = table_of([*self.rows, *new])  # raises before anything changes
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer)
        write_atomic(self.path / METRICS, buffer.getvalue().to_pybytes())
        return new

    def add_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append one JSON line a sample to samples.jsonl. Non-finite numbers are written as null."""
        path = self.path / SAMPLES
        lines = "".join(json.dumps(plain(sample), ensure_ascii=False) + "\n" for sample in samples)
        old = path.read_bytes() if path.exists() else b""
        write_atomic(path, old + lines.encode())

    def add_kept(self, kept: Iterable[Kept]) -> None:
        """Append kept tokens and rewrite kept.parquet."""
        tables = [*self._kept, to_table(kept, self.path.name)]
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.concat_tables(tables), buffer)
        write_atomic(self.path / KEPT, buffer.getvalue().to_pybytes())
        self._kept = tables

    def finish(self, status: str, note: str | None = None, error: str | None = None) -> None:
        """Record the end of the run: status ok, failed, oom or interrupted, a note, and the error's text."""
        if status not in RUN_STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(RUN_STATUSES)}")
        self._update(status=status, note=note, error=error, finished=_now())

    def _update(self, **changes: Any) -> None:
        status = self._status | changes
        write_atomic(self.path / STATUS, to_json(status))
        self._status = status


def clean_label(label: str) -> str:
    """`compare=[full,H2O]` -> `compare-full-h2o`: a part of a folder's name that no shell needs quoted."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:60].rstrip("-") or "run"


def check_writable(results_dir: str | Path, what: str = "results folder") -> None:
    """Raise UserError unless files and folders can be made in `results_dir`. Leaves nothing behind.

    Tried in the nearest folder that exists: the results folder itself is not made here.
    """
    path = Path(results_dir)
    advice = "choose a folder that can be written"
    try:
        if "\0" in str(path):  # Path.exists() would call it a name that is free
            raise ValueError("null byte in the name")
        existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise UserError(f"{what} {str(path)!r}: {str(existing)!r} is a file; {advice}")
        os.rmdir(tempfile.mkdtemp(prefix=".probe_", dir=existing))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{what} {str(path)!r} cannot be written ({reason}); {advice}") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
