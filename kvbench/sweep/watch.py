"""Waiting for the jobs of a sweep by what they themselves write down: a launcher may wait for one that was killed.

submitit asks Slurm every ten minutes how a job is, and for ever where there is no accounting. It also stops waiting at
the first job that died, while others still run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kvbench.background import repeating
from kvbench.files import read_json
from kvbench.results.claims import is_alive
from kvbench.sweep.plan import PLAN, Sweep, job_records

LOOK_S = 2.0
IDLE_S = 20.0
"""For so long no job may have been at work before the rest is taken for lost."""


class NothingAtWork(Exception):
    """Every job has begun, none is at work, and the launcher still waits."""


@contextmanager
def until_idle(sweep: Sweep) -> Iterator[None]:
    """A block in which a launcher waits for the jobs; raises NothingAtWork in it once there is nothing to wait for.

    Jobs that are still to begin, or that were sent back to the queue, are waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise NothingAtWork("every job has begun and none is at work")

    main = threading.main_thread().ident
    idle_since: float | None = None
    before = signal.signal(signal.SIGUSR1, give_up)

    def look() -> bool:
        nonlocal idle_since
        records = job_records(sweep.folder, sweep.started)
        wanted = len(read_json(sweep.folder / PLAN).get("jobs") or [])
        over = len(records) >= wanted and not any(_at_work(record) or record.get("requeued") for record in records)
        idle_since = (idle_since or time.monotonic()) if over else None
        if idle_since is None or time.monotonic() - idle_since <= IDLE_S or main is None:
            return False
        signal.pthread_kill(main, signal.SIGUSR1)
        return True

    try:
        with repeating(look, LOOK_S):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def wait_for_jobs(sweep: Sweep) -> None:
    """Return once no job of the sweep has been at work for a few looks in a row."""
    quiet = 0
    while quiet < 3:
        quiet = 0 if any(_at_work(record) for record in job_records(sweep.folder, sweep.started)) else quiet + 1
        time.sleep(LOOK_S)


def _at_work(record: dict[str, Any]) -> bool:
    return record.get("finished") is None and is_alive(record.get("owner"), Path(record["file"]))
