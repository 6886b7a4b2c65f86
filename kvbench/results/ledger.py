"""What became of cells: the records of them in all run folders of a results folder. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.files import find_files
from kvbench.results.claims import is_alive
from kvbench.results.row import Row, rows_of
from kvbench.results.run_files import METRICS, STATUS, RunFiles, read_run

DONE = ("ok", "oom", "skipped")
"""Statuses that need no second attempt: running out of memory is a result."""
RERUN = (None, "failed", "all")
ORDER = ("ok", "oom", "skipped", "running", "waiting", "failed", "interrupted", "unreadable", "elsewhere")
"""Statuses of a record; of several records of a cell the one that comes first here counts."""


@dataclass(frozen=True)
class Record:
    """What a run folder's status.json says of one cell. alive: whether the process of that run is running."""

    files: RunFiles
    content: dict[str, Any]
    alive: bool

    @property
    def run(self) -> Path:
        return self.files.run

    @property
    def status(self) -> str:
        """One of `ORDER`.

        interrupted: begun or waiting in a run whose process has ended. unreadable: finished, and its rows cannot be
        read, because metrics.parquet is lost or damaged.
        """
        stated = str(self.content["status"])
        if stated in ("running", "waiting"):
            return stated if self.alive else "interrupted"
        return stated if self.files.can_read(self.content) else "unreadable"

    @property
    def finished(self) -> float:
        """Seconds since the epoch, 0 before the end."""
        return float(self.content.get("finished") or 0)


class Ledger:
    """The cells that the run folders below `results` record, read again where a file of theirs has changed."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._read: dict[Path, tuple[tuple[Any, ...], RunFiles]] = {}

    def runs(self) -> list[RunFiles]:
        """Status and rows of every run folder, oldest folder first."""
        folders = {file.parent for file in find_files(self.results, STATUS, METRICS)}
        return [self._files(run) for run in sorted(folders, key=lambda run: (run.name, run))]

    def records(self) -> Iterator[Record]:
        """Every record of every run folder, oldest folder first."""
        for files in self.runs():
            running = files.status["status"] == "running"
            alive = running and is_alive(files.status.get("owner"), files.run / STATUS)
            for content in files.status.get("cells") or []:
                yield Record(files, content, alive)

    def by(self, name: str) -> dict[str, list[Record]]:
        """Records by `key`, `id` or `kind`; records without that field are left out."""
        found: dict[str, list[Record]] = {}
        for record in self.records():
            if value := record.content.get(name):
                found.setdefault(value, []).append(record)
        return found

    def _files(self, run: Path) -> RunFiles:
        stamp = (_stamp(run / STATUS), _stamp(run / METRICS))
        if run not in self._read or self._read[run][0] != stamp:
            self._read[run] = (stamp, read_run(run))
        return self._read[run][1]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What changes whenever a file is written; None if it is absent."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def reusable_record(records: Iterable[Record], rerun: str | None = None, since: float = 0.0) -> Record | None:
    """The record that makes another run of its cell unnecessary, or None.

    rerun: None accepts the statuses in DONE, `failed` only ok, `all` none. A record finished after `since` (seconds
    since the epoch: when this command began) is accepted in any case, so that a job that was queued again, or two jobs
    with a cell in common, measure nothing twice.
    """
    best = None
    for record in records:
        enough = {None: DONE, "failed": ("ok",), "all": ()}[rerun]
        fresh = since > 0 and record.finished >= since
        counts = record.status in enough or (fresh and record.status in DONE)
        if counts and (best is None or best.status != "ok" or record.status == "ok"):
            best = record
    return best


def latest_status(records: Iterable[Record]) -> Record | None:
    """Of several records of a cell the one that tells its status: finished, else running, else the last attempt."""
    ranked = sorted(records, key=lambda record: (-ORDER.index(record.status), record.finished))
    return ranked[-1] if ranked else None


def record_rows(record: Record) -> list[Row]:
    """The rows of a record; none where it has none or they cannot be read."""
    rows = record.content.get("rows")
    if not rows or not record.files.can_read(record.content):
        return []
    return rows_of(record.files.frame(range(*rows)))
