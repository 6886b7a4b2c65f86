"""Waiting for the jobs of a sweep by the files that the jobs write, because a launcher may wait for a killed job.

submitit asks Slurm every ten minutes about a job, and without end where Slurm keeps no accounts. It also stops waiting
at the first job that was killed, while others still run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvbench.background import repeating
from kvbench.sweep.plan_files import PLAN, Sweep, is_at_work, job_records, read_plan

LOOK_S = 2.0
IDLE_S = 20.0
"""After so long without a running job, jobs that have not finished count as lost."""


class NothingAtWork(Exception):
    """Every job has begun, none is running, and the launcher still waits."""


@contextmanager
def until_idle(sweep: Sweep) -> Iterator[None]:
    """A block in which a launcher waits for the jobs; NothingAtWork is raised in it once no job is left to wait for.

    Jobs that have not begun or were sent back to the queue are waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop_waiting(number: int, frame: FrameType | None) -> None:
        raise NothingAtWork("every job has begun and none is running")

    main = threading.main_thread().ident
    idle_since: float | None = None
    before = signal.signal(signal.SIGUSR1, stop_waiting)

    def look() -> bool:
        nonlocal idle_since
        records = job_records(sweep.folder, sweep.started)
        wanted = len(read_plan(sweep.folder / PLAN).get("jobs") or [])
        over = len(records) >= wanted and not any(is_at_work(record) or record.get("requeued") for record in records)
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
    """Return once no job of the sweep was running at three looks in a row."""
    quiet = 0
    while quiet < 3:
        quiet = 0 if any(is_at_work(record) for record in job_records(sweep.folder, sweep.started)) else quiet + 1
        time.sleep(LOOK_S)
