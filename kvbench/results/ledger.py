"""What became of cells: the records that run folders keep of them. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.files import read_json
from kvbench.results.claims import is_alive
from kvbench.results.folder import STATUS, rows_between
from kvbench.results.row import Row, rows_of

DONE = ("ok", "oom", "skipped")
"""What needs no second attempt: running out of memory is a result."""
RERUN = (None, "failed", "all")


@dataclass(frozen=True)
class Record:
    """A cell as a run folder's status.json has it."""

    run: Path
    content: dict[str, Any]
    alive: bool

    @property
    def status(self) -> str:
        """waiting | running | ok | oom | failed | interrupted | skipped | elsewhere.

        What a process had begun and not finished when it died is interrupted, whatever its file says.
        """
        stated = str(self.content.get("status"))
        return "interrupted" if stated in ("running", "waiting") and not self.alive else stated

    @property
    def finished(self) -> float:
        """Seconds since the epoch, 0 before the end."""
        return float(self.content.get("finished") or 0)


class Ledger:
    """The cells that the run folders below `results` record, read again where a status.json has changed."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._read: dict[Path, tuple[tuple[int, int, int], dict[str, Any]]] = {}

    def records(self) -> Iterator[Record]:
        """Every record of every run folder, oldest folder first."""
        for file in sorted(self.results.rglob(STATUS), key=lambda file: file.parent.name):
            if any(part.startswith(".") for part in file.relative_to(self.results).parts):
                continue
            status = self._status(file)
            cells = status.get("cells") or []
            alive = is_alive(status.get("owner"), file) if status.get("status") == "running" else False
            for content in cells:
                yield Record(file.parent, content, alive)

    def by(self, name: str) -> dict[str, list[Record]]:
        """Records by `key`, `id` or `kind`."""
        found: dict[str, list[Record]] = {}
        for record in self.records():
            found.setdefault(str(record.content.get(name)), []).append(record)
        return found

    def _status(self, file: Path) -> dict[str, Any]:
        try:
            stat = file.stat()
        except OSError:
            return {}
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if file not in self._read or self._read[file][0] != stamp:
            self._read[file] = (stamp, read_json(file))
        return self._read[file][1]


def settled(records: Iterable[Record], rerun: str | None = None, since: float = 0.0) -> Record | None:
    """The record that makes another run of its cell unnecessary, or None.

    rerun: null takes what is in DONE, `failed` only what is ok, `all` nothing; what was finished after `since`
    (seconds since the epoch: when this command began) counts in any case, so that a job that was requeued, or two
    jobs with a cell in common, run nothing twice.
    """
    best = None
    for record in records:
        enough = {None: DONE, "failed": ("ok",), "all": ()}[rerun]
        fresh = since > 0 and record.finished >= since
        counts = record.status in enough or (fresh and record.status in DONE)
        if counts and (best is None or best.status != "ok" or record.status == "ok"):
            best = record
    return best


def standing(records: Iterable[Record]) -> Record | None:
    """Of several records of a cell the one that tells where it stands: a result, else who is at it, else the last."""
    order = ("ok", "oom", "skipped", "running", "waiting", "failed", "interrupted", "elsewhere")
    ranked = sorted(records, key=lambda record: (-order.index(record.status), record.finished))
    return ranked[-1] if ranked else None


def record_rows(record: Record) -> list[Row]:
    """The rows that a cell's record names; none where its file is gone."""
    if not record.content.get("rows"):
        return []
    try:
        return rows_of(rows_between(record.run, *record.content["rows"]))
    except OSError:
        return []
