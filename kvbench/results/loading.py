"""Finding run folders and loading their rows: those that status.json counts and that no later run replaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.errors import UserError
from kvbench.files import find_files
from kvbench.results.row import frame_of
from kvbench.results.run_files import METRICS, STATUS, RunFiles, read_run


@dataclass(frozen=True)
class Loaded:
    """The rows of run folders. promised: how many rows their status.json files count, replaced ones left out.

    incomplete: run folders in which fewer rows were found than promised, because metrics.parquet is lost or damaged.
    """

    frame: pd.DataFrame
    promised: int
    incomplete: tuple[Path, ...] = ()

    @property
    def found(self) -> int:
        """How many of the promised rows were read."""
        return len(self.frame)


def find_runs(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Run folders at or below the paths, sorted by name within each path, whatever state they are in.

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
        runs = {file.parent.resolve() for file in find_files(path, STATUS, METRICS)}
        if not runs:
            raise UserError(f"no run folder in {str(path)!r}; a run folder holds {METRICS} and {STATUS}")
        found |= dict.fromkeys(sorted(runs))
    return list(found)


def load(paths: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """All rows of run folders, or of folders of them, with the columns of `Row` in nullable dtypes.

    Leaves out rows that status.json does not count (their cell was not finished) and failures of cells that another of
    the runs measured. Damaged files are skipped with a warning. Raises UserError, one line, if no rows can be read.
    """
    runs = [read_run(run) for run in find_runs(paths)]
    if all(run.table is None for run in runs):
        damaged = [str(run.run / METRICS) for run in runs if (run.run / METRICS).exists()]
        if damaged:
            raise UserError(f"{damaged[0]!r} is not a readable parquet file of rows; remove it or restore it")
        states = ", ".join(sorted({str(run.status["status"]) for run in runs}))
        raise UserError(f"{len(runs)} run folder(s) found, none has a {METRICS} yet (status: {states})")
    return rows_of_runs(runs).frame


def load_what_is_there(paths: str | Path | Iterable[str | Path]) -> Loaded:
    """As `load`, with the number of rows that should be there; no rows where none can be read."""
    return rows_of_runs([read_run(run) for run in find_runs(paths)])


def rows_of_runs(runs: Sequence[RunFiles]) -> Loaded:
    """The rows of runs that count, and how many there should be."""
    replaced = replaced_rows(runs)
    frames, promised, incomplete = [], 0, []
    for run in runs:
        left_out = replaced.get(run.run, set())
        promised += run.promised - sum(number < run.promised for number in left_out)
        if not left_out.issuperset(range(run.found, run.promised)):
            incomplete.append(run.run)
        if run.found:
            frames.append(run.frame([number for number in range(run.found) if number not in left_out]))
    return Loaded(pd.concat(frames, ignore_index=True) if frames else frame_of([]), promised, tuple(incomplete))


def replaced_rows(runs: Iterable[RunFiles]) -> dict[Path, set[int]]:
    """For each run folder the numbers of the rows that another run replaces.

    A cell that is ok and can be read replaces all failed and all unreadable records of its key; where none is ok, the
    last failed one stays.
    """
    good: set[str] = set()
    others: dict[str, list[tuple[float, Path, range]]] = {}
    for run, cell, key in _cells_with_rows(runs):
        readable = run.can_read(cell)
        if cell["status"] == "ok" and readable:
            good.add(key)
        else:
            finished = float(cell.get("finished") or 0) if readable else -1.0
            others.setdefault(key, []).append((finished, run.run, range(*cell["rows"])))
    replaced: dict[Path, set[int]] = {}
    for key, records in others.items():
        records.sort(key=lambda record: record[0])
        for _, path, numbers in records if key in good else records[:-1]:
            replaced.setdefault(path, set()).update(numbers)
    return replaced


def _cells_with_rows(runs: Iterable[RunFiles]) -> Iterator[tuple[RunFiles, dict[str, Any], str]]:
    for run in runs:
        for cell in run.status.get("cells") or []:
            if cell.get("rows") and cell.get("key"):
                yield run, cell, cell["key"]
