"""Another process that runs, for tests of who owns what."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbench.results import claims
from kvbench.results.claims import this_process


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing and is killed at the end of the block."""
    process = subprocess.Popen(["sleep", "100"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def owner_of(pid: int) -> dict[str, Any]:
    """What `this_process` says in that process."""
    return this_process() | {"pid": pid, "start": claims._start_time(pid)}
