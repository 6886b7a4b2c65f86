"""Claims: one process measures a cell, and the claim of a killed process is replaced."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.results import claims
from kvbench.results.claims import Claims, is_alive, this_process
from tests.shared.paths import ROOT
from tests.shared.processes import owner_of, sleeping


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


def test_a_claim_belongs_to_one_until_its_owner_is_gone(tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
    mine = Claims(tmp_path)
    assert mine.take("a" * 64)
    assert not Claims(tmp_path).take("a" * 64)
    mine.release()
    assert Claims(tmp_path).take("a" * 64)

    theirs = tmp_path / ".claims" / f"{'b' * 32}.json"
    theirs.write_text(json.dumps({"owner": owner_of(stranger.pid)}))
    assert not mine.take("b" * 64)
    stranger.kill()
    stranger.wait()
    assert mine.take("b" * 64)


def test_a_process_elsewhere_is_alive_while_it_touches_its_files(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    beat.touch()
    elsewhere = this_process() | {"machine": "another"}
    assert is_alive(elsewhere, beat)
    os.utime(beat, (1, 1))
    assert not is_alive(elsewhere, beat)
    assert is_alive(this_process(), beat)
    reused = this_process() | {"start": "1"}
    assert not is_alive(reused, beat)


def take_it(folder: Path, gate: Any, taken: Any) -> None:
    mine = Claims(folder)
    gate.wait()
    if mine.take("c" * 64):
        with taken.get_lock():
            taken.value += 1
    gate.wait()  # alive until all have tried


def test_of_many_that_find_a_dead_claim_one_gets_it(tmp_path: Path) -> None:
    (tmp_path / ".claims").mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / ".claims" / f"{'c' * 32}.json").write_text(json.dumps({"owner": owner_of(dead.pid) | {"start": "1"}}))
    fork = multiprocessing.get_context("fork")
    gate, taken = fork.Barrier(8), fork.Value("i", 0)
    processes = [fork.Process(target=take_it, args=(tmp_path, gate, taken)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert taken.value == 1


# faults

KILLED = """
import os, sys
from pathlib import Path
from kvbench.results.claims import Claims
setattr(os, sys.argv[2], lambda *_, **__: os._exit(9))
Claims(Path(sys.argv[1])).take("d" * 64)
"""


@pytest.mark.parametrize("point", ["fsync", "link", "unlink"])
def test_a_process_killed_while_it_claims_blocks_nobody(tmp_path: Path, point: str) -> None:
    """Killed after writing aside, before linking, and after linking."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), point], cwd=ROOT, check=False)
    assert done.returncode == 9
    assert Claims(tmp_path).take("d" * 64)


def test_a_claim_is_complete_from_the_moment_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, seen = os.link, []

    def look(source: Path, target: Path) -> None:
        assert not target.exists()
        link(source, target)
        seen.append(json.loads(target.read_text())["owner"])

    monkeypatch.setattr(os, "link", look)
    assert Claims(tmp_path).take("e" * 64)
    assert seen == [this_process()]
    assert [file.name for file in (tmp_path / ".claims").iterdir()] == [f"{'e' * 32}.json"]


def test_without_links_a_claim_still_belongs_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    mine = Claims(tmp_path)
    assert mine.take("f" * 64) and not Claims(tmp_path).take("f" * 64)
    mine.release()
    assert Claims(tmp_path).take("f" * 64)


def test_an_empty_claim_blocks_for_two_seconds_only(tmp_path: Path) -> None:
    """What a process leaves that was killed before its first write, on a file system without links."""
    mine = Claims(tmp_path)
    (tmp_path / ".claims").mkdir()
    claim = tmp_path / ".claims" / f"{'a' * 32}.json"
    claim.touch()
    assert not mine.take("a" * 64)
    os.utime(claim, (time.time() - 3,) * 2)
    assert mine.take("a" * 64)


@pytest.mark.parametrize(
    "content",
    [
        {"owner": {"host": "x", "machine": "here", "start": "1"}},
        {"owner": {"machine": "here", "pid": "12"}},
        {"owner": {"machine": "here", "pid": -1, "start": "1"}},
        {"owner": {"machine": "here", "pid": 10**30, "start": "1"}},
        {"owner": None},
        {"owner": 3},
        {},
    ],
)
def test_a_claim_without_a_pid_blocks_nobody(tmp_path: Path, content: dict[str, Any]) -> None:
    if isinstance(owner := content.get("owner"), dict):
        owner["machine"] = claims._machine()
    (tmp_path / ".claims").mkdir()
    (tmp_path / ".claims" / f"{'a' * 32}.json").write_text(json.dumps(content))
    assert Claims(tmp_path).take("a" * 64)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"[" * 100_000])
def test_a_damaged_claim_blocks_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".claims").mkdir()
    (tmp_path / ".claims" / f"{'a' * 32}.json").write_bytes(content)
    assert Claims(tmp_path).take("a" * 64)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_claim_dated_in_the_future_by_a_dead_process_blocks_nobody(tmp_path: Path, elsewhere: bool) -> None:
    owner = this_process() | ({"machine": "another"} if elsewhere else {"start": "1"})
    (tmp_path / ".claims").mkdir()
    claim = tmp_path / ".claims" / f"{'a' * 32}.json"
    claim.write_text(json.dumps({"owner": owner}))
    os.utime(claim, (time.time() + 10_000,) * 2)
    assert Claims(tmp_path).take("a" * 64)


def test_who_holds_a_cell_and_until_when(tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
    mine = Claims(tmp_path, "my_run")
    assert mine.holder("a" * 64) is None
    mine.take("a" * 64)
    told = Claims(tmp_path).holder("a" * 64)
    assert told is not None and f"pid {os.getpid()} on" in told and "in my_run" in told and "until that process" in told
    claim = tmp_path / ".claims" / f"{'b' * 32}.json"
    claim.write_text(json.dumps({"owner": owner_of(stranger.pid) | {"machine": "another", "host": "far"}}))
    until = time.strftime("%H:%M:%S", time.localtime(claim.stat().st_mtime + claims.SILENCE_S))
    assert mine.holder("b" * 64) == (
        f"pid {stranger.pid} on far, holds it until {until} at least; it renews that every 20 s while it runs"
    )
