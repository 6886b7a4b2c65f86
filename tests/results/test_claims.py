"""Claims: one process measures a cell, and the claim of a killed process is replaced."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.results import claims
from kvbench.results.claims import Claims, is_alive, this_process


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def owner_of(pid: int) -> dict[str, Any]:
    return this_process() | {"pid": pid, "start": claims._start_time(pid)}


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
