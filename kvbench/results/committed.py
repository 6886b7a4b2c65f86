"""Which rows of run folders count: those that status.json vouches for and no later run has made good.

metrics.parquet is written before the status.json that counts its rows, so a process killed between the two leaves
rows of a cell that will be measured again. Imports neither torch nor pandas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.files import read_json


def drop_list(statuses: Mapping[Path, Mapping[str, Any]]) -> dict[Path, set[int]]:
    """For each run folder the row numbers that are to be left out: failures of cells that another record made good.

    A record that is ok makes good every failed one of its key; of several failed ones the last stands.
    """
    failed: dict[str, list[tuple[float, Path, tuple[int, int]]]] = {}
    good: set[str] = set()
    for run, status in statuses.items():
        for cell in status.get("cells") or []:
            if cell.get("status") == "ok":
                good.add(str(cell.get("key")))
            elif cell.get("rows"):
                start, stop = cell["rows"]
                failed.setdefault(str(cell.get("key")), []).append((cell.get("finished") or 0, run, (start, stop)))
    dropped: dict[Path, set[int]] = {}
    for key, records in failed.items():
        records.sort(key=lambda record: record[0])
        for _, run, (start, stop) in records if key in good else records[:-1]:
            dropped.setdefault(run, set()).update(range(start, stop))
    return dropped


def read_statuses(runs: Iterable[Path], name: str) -> dict[Path, dict[str, Any]]:
    return {run: read_json(run / name) for run in runs}
