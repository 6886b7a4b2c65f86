"""Claims on cells, and whether the process that owns something still runs. Imports no torch.

Two sweeps may write to one results folder. A process claims a cell by linking a complete file to the claim's name,
which succeeds for one process only, on network file systems too. The file names its owner, so that the claim of a
killed process can be replaced.
"""

from __future__ import annotations

import errno
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
from kvbench.files import read_json, temporary_name, write_synced
from kvbench.results.checks import is_count

CLAIMS = ".claims"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What `os.link` raises on a file system without hard links."""
BEAT_S = 20.0
"""How often a running process touches its files."""
EMPTY_S = 2.0
"""How long a claim may be empty while its owner writes it, on a file system without hard links."""
SILENCE_S = 180.0
"""A process on another machine counts as dead when it has not touched its files for so long."""


def this_process() -> dict[str, Any]:
    """What identifies this process among all machines that share a file system, reboots and containers included."""
    return {"host": platform.node(), "machine": _machine(), "pid": os.getpid(), "start": _start_time(os.getpid())}


def is_alive(owner: Any, beat: Path) -> bool:
    """Whether the process that `this_process` described still runs.

    A process of this machine is looked up. A process of another machine, or an unknown one (None), touches the file
    `beat` while it runs: true if that was touched within the last `SILENCE_S` seconds. A date further in the future
    than that counts as old. An owner without a pid does not run.
    """
    if owner is None or (isinstance(owner, dict) and is_count(owner.get("pid")) and owner.get("machine") != _machine()):
        return abs(_age(beat)) < SILENCE_S
    if not isinstance(owner, dict) or not is_count(owner.get("pid")):
        return False
    start = _start_time(owner["pid"])
    return start is not None and start == owner.get("start")


def _machine() -> str:
    """The boot and the process namespace, within which a pid names one process."""
    parts = [platform.node()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process, which tell a reused pid apart. None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        with suppress(OSError):  # a system without /proc tells only whether it runs
            os.kill(pid, 0)
            return "unknown"
        return None
    if len(fields) < 20 or fields[0] == "Z":  # a zombie has ended, its parent has not asked yet
        return None
    return fields[19]


def _age(file: Path) -> float:
    """Seconds since a file was touched, by this machine's clock (negative: in the future); infinite if it is gone."""
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
        """Claim a cell by its resume key; False where another living process holds it."""
        path = self._path(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._create(path):
            if _is_held(path):
                return False
            # Of two processes that find one dead claim, the second must not remove the claim of the first.
            with self._locked():
                if _is_held(path):
                    return False
                path.unlink(missing_ok=True)
                if not self._create(path):
                    return False
        self.held[key] = path
        return True

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Remove claims of this process: those of `keys`, or all."""
        for key in list(self.held) if keys is None else list(keys):
            path = self.held.pop(key, None)
            with suppress(OSError):
                if path is not None and read_json(path).get("owner") == this_process():
                    path.unlink()

    def holder(self, key: str) -> str | None:
        """Who holds a cell and until when, for people; None where nobody does."""
        path = self._path(key)
        content = read_json(path)
        owner = content.get("owner")
        if not is_alive(owner, path) or not isinstance(owner, dict):
            return None
        where = f"pid {owner['pid']} on {owner.get('host')}" + (f", in {content['run']}" if content.get("run") else "")
        if owner.get("machine") == _machine():
            return f"{where}, holds it until that process ends"
        with suppress(OSError):
            until = time.strftime("%H:%M:%S", time.localtime(path.stat().st_mtime + SILENCE_S))
            return f"{where}, holds it until {until} at least; it renews that every {BEAT_S:.0f} s while it runs"
        return None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}.json"

    def _create(self, path: Path) -> bool:
        """Make a claim that is complete from the start; False where there is one already."""
        content = json.dumps({"owner": this_process(), "run": self.run}).encode()
        temporary = temporary_name(path)
        try:
            write_synced(temporary, content)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return temporary.stat().st_nlink > 1  # NFS may repeat a request that had succeeded
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                return _create_without_link(path, content)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Run the block in one process at a time."""
        with (self.folder / "lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks: creating the claim still keeps most of two apart
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _create_without_link(path: Path, content: bytes) -> bool:
    """The same on a file system without links, where a process killed before its first write leaves an empty claim."""
    try:
        write_synced(path, content)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _is_held(path: Path) -> bool:
    """Whether the owner of a claim runs; an empty claim counts for `EMPTY_S`, in which its owner may be writing it."""
    with suppress(OSError):
        if path.stat().st_size == 0:
            return abs(_age(path)) < EMPTY_S
    owner = read_json(path).get("owner")
    return owner is not None and is_alive(owner, path)


@contextmanager
def beating(files: Iterable[Path], claims: Claims | None = None) -> Iterator[None]:
    """Touch `files` and the claims while the block runs, so that other machines see that this process runs."""

    def beat() -> None:
        for file in [*files, *(list(claims.held.values()) if claims else [])]:
            with suppress(OSError):
                os.utime(file)

    with repeating(beat, BEAT_S):
        yield
