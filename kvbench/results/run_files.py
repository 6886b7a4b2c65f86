"""The files of a run folder, read: status.json, metrics.parquet, provenance.json and samples.jsonl, each checked.

A file that is damaged counts as absent, after a warning that names it. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvbench.results.checks import (
    LONGEST_NAME,
    is_count,
    is_list_of,
    is_name,
    is_number,
    is_object,
    is_one_of,
    is_row_count,
    is_row_range,
    is_text,
    optional,
    problem_of,
    read_object,
    skip,
)
from kvbench.results.claims import is_alive
from kvbench.results.old_folders import fill_missing_columns
from kvbench.results.row import FLAGS, ROW_STATUSES, SCHEMA, WEIGHTS, frame_of, frame_of_table, to_rows

METRICS, SAMPLES, STATUS, CONFIG, PROVENANCE = (
    "metrics.parquet",
    "samples.jsonl",
    "status.json",
    "config.yaml",
    "provenance.json",
)
RUN_STATUSES = ("running", "ok", "failed", "oom", "interrupted")
CELL_STATUSES = ("waiting", "running", "ok", "oom", "failed", "interrupted", "skipped", "elsewhere")
LONG_TEXT = ("model", "dataset", "knobs", "note", "flags", "revision", "run")
"""Text columns of any length; all others hold names."""

_STATUS = {
    "status": optional(is_one_of(*RUN_STATUSES)),
    "started": optional(is_text),
    "finished": optional(is_text),
    "owner": optional(is_object),
    "cells_done": optional(is_count),
    "error": optional(is_text),
    "note": optional(is_text),
    "key": optional(is_text),
    "rows": optional(is_row_count),
    "cells": optional(is_list_of(is_object)),
}
_CELL = {
    "status": is_one_of(*CELL_STATUSES),
    "id": optional(is_name),
    "kind": optional(is_name),
    "key": optional(is_name),
    "method": optional(is_name),
    "measure": optional(is_name),
    "knobs": optional(is_object),
    "context": optional(is_count),
    "device": optional(is_text),
    "rows": optional(is_row_range),
    "started": optional(is_number),
    "finished": optional(is_number),
    "seconds": optional(is_number),
    "note": optional(is_text),
    "traceback": optional(is_text),
}
_PROVENANCE = {
    "command": optional(is_text),
    "git": optional(is_object),
    "packages": optional(is_object),
    "cpu": optional(is_object),
    "gpus": optional(is_list_of(is_object)),
    "environment": optional(is_object),
}


@dataclass(frozen=True)
class RunFiles:
    """What status.json and metrics.parquet of a run folder say.

    status: {"status": "unknown"} where status.json is absent or damaged. table: all rows, in the columns of `Row`; None
    where there are none that can be read. promised: how many rows status.json counts; without a status.json those of
    the table, but none where other files show that a status.json was lost.
    """

    run: Path
    status: dict[str, Any]
    table: pa.Table | None
    promised: int

    @property
    def found(self) -> int:
        """How many of the promised rows can be read."""
        return min(self.promised, 0 if self.table is None else self.table.num_rows)

    def frame(self, numbers: Sequence[int]) -> pd.DataFrame:
        """The rows of these numbers, in nullable dtypes; none where no table can be read."""
        if self.table is None:
            return frame_of([])
        return frame_of_table(self.table).iloc[list(numbers)]

    def can_read(self, cell: Mapping[str, Any]) -> bool:
        """Whether the rows that a cell's record names are there."""
        return not cell.get("rows") or cell["rows"][1] <= self.found


def read_run(run: Path) -> RunFiles:
    """The status and the rows of a run folder. Never raises for what stands in the files."""
    status = read_object(run / STATUS, status_problem)  # before the rows: those that it counts are written by then
    table = read_metrics(run)
    if status is not None:
        promised = status.get("rows")
        count = (0 if table is None else table.num_rows) if promised is None else promised
        return RunFiles(run, {"status": "unknown"} | status, table, count)
    lost = any((run / name).exists() for name in (STATUS, CONFIG, PROVENANCE))
    if lost and table is not None:
        skip(run / METRICS, f"its {STATUS} is lost or damaged, so its rows may have been measured again elsewhere")
    return RunFiles(run, {"status": "unknown"}, table, 0 if lost or table is None else table.num_rows)


def status_problem(status: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a status.json; None where nothing is."""
    wrong = problem_of(status, _STATUS) if set(status) & set(_STATUS) else "it holds no field of a status"
    for number, cell in enumerate([] if wrong else status.get("cells") or []):
        if reason := problem_of(cell, _CELL):
            return f"in cells[{number}] {reason}"
    return wrong


def read_status(run: Path) -> dict[str, Any]:
    """status.json of a run folder; {"status": "unknown"} if there is none or it cannot be used.

    A run that calls itself running while its process is gone is "interrupted".
    """
    status = {"status": "unknown"} | (read_object(run / STATUS, status_problem) or {})
    if status["status"] == "running" and "owner" in status and not is_alive(status["owner"], run / STATUS):
        status |= {"status": "interrupted", "note": "its process is gone; the same command goes on where it stopped"}
    return status


def read_metrics(run: Path) -> pa.Table | None:
    """The rows of metrics.parquet as a table of `kvbench.results.row.SCHEMA`; None if absent or damaged."""
    file = run / METRICS
    table = read_parquet(file)
    if table is None:
        return None
    stored = table.column_names
    try:
        table = to_rows(table)
        reason = _wrong_value(table)
        if not reason and not {"weights", "flags"} <= set(stored):
            frame = fill_missing_columns(frame_of_table(table), stored)
            table = pa.Table.from_pandas(frame, schema=SCHEMA, preserve_index=False).replace_schema_metadata()
    except (pa.ArrowException, KeyError, ValueError) as error:
        reason = f"a column holds values of another kind ({error})"
    if reason is not None:
        skip(file, reason)
        return None
    return table


def read_parquet(file: Path) -> pa.Table | None:
    """The table in a parquet file; None if the file is absent or, after a warning, not readable."""
    try:
        return pq.ParquetFile(file).read(use_threads=False)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError) as error:
        skip(file, f"it is not a readable parquet file ({error})")
        return None


def _wrong_value(table: pa.Table) -> str | None:
    """The first value that `Row` does not allow or no table can show."""
    allowed = {"status": ROW_STATUSES, "weights": (*WEIGHTS, None)}
    for name, choices in allowed.items():
        for value in table[name].unique().to_pylist():
            if value not in choices:
                return f"{name} is {str(value)[:40]!r}"
    for flags in table["flags"].unique().to_pylist():
        if set((flags or "").split()) - set(FLAGS):
            return f"flags is {flags[:40]!r}"
    for field in table.schema:
        if field.type == pa.string() and field.name not in LONG_TEXT and table.num_rows:
            longest = pc.max(pc.utf8_length(table[field.name])).as_py() or 0
            if longest > LONGEST_NAME:
                return f"a {field.name} has {longest:,} letters"
    for knobs in table["knobs"].unique().to_pylist():
        if not _is_object(knobs):
            return f"knobs is {knobs[:40]!r}"
    return None


def _is_object(text: str | None) -> bool:
    try:
        return text is None or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_provenance(run: Path) -> dict[str, Any]:
    """provenance.json of a run folder; {} if there is none or it cannot be used."""
    return read_object(run / PROVENANCE, lambda content: problem_of(content, _PROVENANCE)) or {}


def sample_records(run: Path) -> list[dict[str, Any]]:
    """The objects in samples.jsonl, one a line; lines that hold none are skipped, with one warning."""
    file, found, bad = run / SAMPLES, [], 0
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    for line in filter(str.strip, lines):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            found.append(content)
        else:
            bad += 1
    if bad:
        skip(file, f"{bad} of its lines, which hold no JSON object")
    return found
