"""Who is at work on what: processes that can be told dead or alive, and claims on cells. Imports no torch.

Two sweeps may write to one results folder. A cell is taken by creating a file with O_EXCL, which one process alone
can do, on network file systems too. The file names its owner, so that the claim of a process that was killed is
found out and taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvbench.background import repeating
from kvbench.files import read_json

CLAIMS = ".claims"
BEAT_S = 20.0
"""How often a living process touches its files."""
SILENCE_S = 180.0
"""A process on another machine that has not touched its files for so long is taken for dead."""


def this_process() -> dict[str, Any]:
    """What identifies this process among all machines that share a file system, across reboots and containers."""
    return {"host": platform.node(), "machine": _machine(), "pid": os.getpid(), "start": _start_time(os.getpid())}


def is_alive(owner: Any, beat: Path) -> bool:
    """Whether the process that `this_process` described still runs.

    On its own machine the process table knows. On another one `beat` does, a file that the owner touches as long as
    it lives: true while that was touched within the last `SILENCE_S` seconds.
    """
    if not isinstance(owner, dict) or owner.get("machine") != _machine():
        return _age(beat) < SILENCE_S
    start = _start_time(int(owner["pid"]))
    return start is not None and start == owner.get("start")


def _machine() -> str:
    """Boot and process namespace: inside one of them a pid means one process."""
    parts = [platform.node()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which a process began: a reused pid has another. None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        with suppress(OSError):  # a system without /proc: alive or not is all that can be known
            os.kill(pid, 0)
            return "unknown"
        return None
    return None if fields[0] == "Z" else fields[19]  # a zombie is dead, its parent has just not looked yet


def _age(file: Path) -> float:
    """Seconds since a file was touched, by the clock of this machine; infinite if it is gone."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")


class Claims:
    """The claims that this process holds in one results folder. `run` is the name of its run folder, for others."""

    def __init__(self, results: Path, run: str = "") -> None:
        self.folder = results / CLAIMS
        self.run = run
        self.held: dict[str, Path] = {}

    def take(self, key: str) -> bool:
        """Claim a cell by its resume key; False where another living process has it."""
        path = self.folder / f"{key[:32]}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._create(path):
            if is_alive(read_json(path).get("owner"), path):
                return False
            # Of two that find one dead claim the second must not remove what the first has just put in its place.
            with self._alone():
                if is_alive(read_json(path).get("owner"), path):
                    return False
                path.unlink(missing_ok=True)
                if not self._create(path):
                    return False
        self.held[key] = path
        return True

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Give claims back: those of `keys`, or all."""
        for key in list(self.held) if keys is None else list(keys):
            path = self.held.pop(key, None)
            with suppress(OSError):
                if path is not None and read_json(path).get("owner") == this_process():
                    path.unlink()

    def _create(self, path: Path) -> bool:
        try:
            with open(path, "x") as file:
                json.dump({"owner": this_process(), "run": self.run}, file)
        except FileExistsError:
            return False
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks: the O_EXCL above still keeps most of two apart
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def beating(files: Iterable[Path], claims: Claims | None = None) -> Iterator[None]:
    """Touch `files` and the claims while the block runs, so that other machines see a living process."""

    def beat() -> None:
        for file in [*files, *(list(claims.held.values()) if claims else [])]:
            with suppress(OSError):
                os.utime(file)

    with repeating(beat, BEAT_S):
        yield
