"""The run folder, atomic writes, the resume key, and `load`.

`metrics.parquet` is tidy: one measured number a row (`kvbench.results.row.Row`), every knob that made it in the row.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml  # type: ignore[import-untyped]

from kvbench.errors import UserError
from kvbench.files import plain, read_json, to_json, write_atomic
from kvbench.results import provenance as provenance_of
from kvbench.results.claims import is_alive, this_process
from kvbench.results.committed import drop_list, read_statuses
from kvbench.results.kept_tokens import KEPT, Kept, to_table
from kvbench.results.old_folders import fill_missing_columns
from kvbench.results.row import KNOBS, Row, frame_of_table, table_of

METRICS, SAMPLES, STATUS, CONFIG, PROVENANCE = (
    "metrics.parquet",
    "samples.jsonl",
    "status.json",
    "config.yaml",
    "provenance.json",
)
RUN_STATUSES = ("running", "ok", "failed", "oom", "interrupted")


class RunFolder:
    """One run on disk: `results/<time>_<label>_<8 hex>` with the five files of a run, each always complete.

    Make one with `RunFolder.create`. `settle` whenever cells are measured (or `add` rows that belong to none), `finish`
    once; all rewrite whole files atomically, so a report can be built at any moment. status.json is what counts: it
    names the cells, with their status and their rows, and is written after the rows.
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
        the run's `resume_key`, `cells` what is to be measured (`Cell.record`). Raises UserError if `results_dir`
        cannot be created or written.
        """
        check_writable(results_dir)
        results = Path(results_dir)
        results.mkdir(parents=True, exist_ok=True)
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
        # Filled under a hidden name and renamed, so that nobody ever sees a run folder without its files.
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

    def settle(self, outcomes: Mapping[str, tuple[Sequence[Row], Mapping[str, Any]]]) -> None:
        """Append the rows of cells and record what became of them, in one step that cannot be seen half done.

        outcomes: for each cell's id its rows and the fields to set in its record (`status`, `note`, `seconds`).
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
        table = table_of([*self.rows, *new])  # converted before anything is kept: one bad row leaves the rest intact
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
        """Close the run: status ok, failed, oom or interrupted, with a remark and the error's text."""
        if status not in RUN_STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(RUN_STATUSES)}")
        self._update(status=status, note=note, error=error, finished=_now())

    def _update(self, **changes: Any) -> None:
        status = self._status | changes
        write_atomic(self.path / STATUS, to_json(status))
        self._status = status


def clean_label(label: str) -> str:
    """`compare=[full,H2O]` -> `compare-full-h2o`: a folder name that needs no quoting anywhere."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:60].rstrip("-") or "run"


def check_writable(results_dir: str | Path, what: str = "results folder") -> None:
    """Raise UserError unless files and folders can be made in `results_dir`. Leaves nothing behind.

    The probe goes into the nearest folder that exists, so that two runs starting together cannot remove a
    folder under each other.
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


def resume_key(
    *,
    model_revision: str,
    config: Mapping[str, Any],
    data_fingerprint: str,
    protocol: str,
    dtype: str,
    device_name: str | None = None,
    kernel: str | None = None,
    threads: int | None = None,
) -> str:
    """sha256 of everything that can change the number; two cells with one key need to run only once.

    `config` is the effective configuration (unused knobs dropped). `device_name`, `kernel` and `threads`
    belong to latency and memory cells; leave them None for quality. Versions of torch and transformers and
    the hash of the source come from the installation.
    """
    parts = {
        "model_revision": model_revision,
        "config": plain(config),
        "data": data_fingerprint,
        "protocol": protocol,
        "dtype": dtype,
        "torch": provenance_of.package_version("torch"),
        "transformers": provenance_of.package_version("transformers"),
        "source": provenance_of.source_hash(),
        "device": device_name,
        "kernel": kernel,
        "threads": threads,
    }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def find_runs(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Run folders at or below the paths, in order of name, whatever state they are in.

    Raises UserError if a path does not exist or holds no run folder.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: dict[Path, None] = {}
    for path in map(Path, given):
        if not path.exists():
            raise UserError(f"no such file or folder: {str(path)!r}; give a run folder or a folder of run folders")
        if path.is_file():
            if path.name not in (METRICS, STATUS):
                raise UserError(f"{str(path)!r} is neither a run folder nor a {METRICS}; give a run folder")
            path = path.parent
        markers = [file for name in (STATUS, METRICS) for file in path.rglob(name)]
        runs = {file.parent for file in markers if not _hidden(file.parent, path)}
        if not runs:
            raise UserError(f"no run folder in {str(path)!r}; a run folder holds {METRICS} and {STATUS}")
        found |= dict.fromkeys(sorted(run.resolve() for run in runs))
    return list(found)


def _hidden(folder: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in folder.relative_to(root).parts)


def read_status(run: Path) -> dict[str, Any]:
    """status.json of a run folder; {"status": "unknown"} if there is none or it cannot be read.

    A run that calls itself running while its process is gone is "interrupted".
    """
    status = {"status": "unknown"} | read_json(run / STATUS)
    if status["status"] == "running" and "owner" in status and not is_alive(status["owner"], run / STATUS):
        status |= {"status": "interrupted", "note": "its process is gone; the same command goes on where it stopped"}
    return status


def load(paths: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """All rows of run folders, or of folders of them, with the columns of `Row` in nullable dtypes.

    Runs that have no metrics yet are skipped, and so are rows that their status.json does not vouch for and failures
    that another of the runs has made good. Raises UserError, one line, if nothing is there to read.
    """
    runs = find_runs(paths)
    statuses = read_statuses(runs, STATUS)  # before the rows: what it counts is there
    files = [run / METRICS for run in runs if (run / METRICS).exists()]
    if not files:
        states = ", ".join(sorted({str(read_status(run)["status"]) for run in runs}))
        raise UserError(f"{len(runs)} run folder(s) found, none has a {METRICS} yet (status: {states})")
    dropped = drop_list(statuses)
    return pd.concat(
        [_read(file, statuses[file.parent].get("rows"), dropped.get(file.parent, set())) for file in files],
        ignore_index=True,
    )


def rows_between(run: Path, start: int, stop: int) -> pd.DataFrame:
    """Rows `start` up to `stop` of a run's metrics.parquet, as a cell's record names them."""
    return _frame(pq.ParquetFile(run / METRICS).read(use_threads=False)).iloc[start:stop].reset_index(drop=True)


def _read(file: Path, count: int | None, dropped: Set[int]) -> pd.DataFrame:
    """The first `count` rows (None: all) but those whose numbers are in `dropped`."""
    try:
        table = pq.ParquetFile(file).read(use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{str(file)!r} is not a readable parquet file; remove it or restore it") from error
    kept = [i for i in range(table.num_rows if count is None else min(count, table.num_rows)) if i not in dropped]
    return _frame(table).iloc[kept]


def _frame(table: pa.Table) -> pd.DataFrame:
    """The rows of one metrics.parquet, with the columns that an old version did not write filled in."""
    return fill_missing_columns(frame_of_table(table), table.column_names)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
