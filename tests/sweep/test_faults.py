"""Faults of the machine during a whole command: lost files, full disks, closed outputs, killed processes."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvbench.cli import status
from kvbench.cli.main import main
from kvbench.errors import SkippedFile
from kvbench.results.run_files import METRICS, STATUS
from tests.shared.paths import ROOT
from tests.shared.sweeping import TINY, environment, rows, times_measured

WORDS = (*TINY, "method=h2o", "budget=16", "measure=[perplexity]", "kernel=reference")


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which `$KVBENCH` is `python -m kvbench WORDS`."""
    command = shlex.join([sys.executable, "-m", "kvbench", *WORDS])
    line = line.replace("$KVBENCH", command)
    return subprocess.run(
        ["bash", "-c", line], env=environment(**variables), cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("damage", ["lost", "truncated", "status truncated"])
def test_the_same_command_measures_again_what_cannot_be_read(tmp_path: Path, damage: str) -> None:
    words = [*WORDS, f"results_dir={tmp_path}"]
    assert main(words) == 0
    whole = len(rows(tmp_path))
    (run,) = (file.parent for file in tmp_path.rglob(STATUS))
    file = run / (STATUS if damage == "status truncated" else METRICS)
    file.unlink() if damage == "lost" else os.truncate(file, file.stat().st_size // 2)
    if damage == "lost":
        assert status.main([str(tmp_path)]) == 3
        assert main(words) == 0
        assert len(rows(tmp_path)) == whole
        assert status.main([str(tmp_path)]) == 0
        return
    with pytest.warns(SkippedFile, match=file.name):
        status.main([str(tmp_path)])
    with pytest.warns(SkippedFile, match=file.name):
        assert main(words) == 0
    with pytest.warns(SkippedFile, match=file.name):
        assert len(rows(tmp_path)) == whole
        assert set(times_measured(tmp_path).values()) == {1}
        assert status.main([str(tmp_path)]) == 0


@pytest.mark.parametrize("sweep", ["", "-m"])
def test_a_limit_on_the_size_of_files_is_one_line(tmp_path: Path, sweep: str) -> None:
    """EFBIG: no file may be larger than 1 KiB, and config.yaml and plan.json are."""
    done = shell(f"ulimit -f 1; $KVBENCH {sweep} results_dir={tmp_path}")
    assert done.returncode == (2 if sweep else 3), done.stderr
    assert "Traceback" not in done.stderr and "File too large" in done.stderr
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob(STATUS))


def test_a_closed_stdout_and_a_folder_with_a_space_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "my results"
    done = shell(f"$KVBENCH \"results_dir='{folder}'\" >&-")
    assert done.returncode == 0, done.stderr
    assert {row.method for row in rows(folder)} == {"full", "h2o"}
    done = shell(f"$KVBENCH \"results_dir='{folder}'\"", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert f"report:     python -m kvbench.report '{folder}'" in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rerun="], "rerun= is unknown"),
        (["rerun=[all]"], "rerun=['all'] is unknown"),
        (["rerun={a:1}"], "rerun={'a': 1} is unknown"),
        (["-m", "rerun=all,failed"], "a sweep takes one rerun="),
        (["results_dir="], "results_dir= is no folder"),
        (["results_dir=null"], "results_dir=None is no folder"),
        (["results_dir=3"], "results_dir=3 is no folder"),
        (["results_dir=[x]"], "results_dir=['x'] is no folder"),
        (["results_dir={a:1}"], "results_dir={'a': 1} is no folder"),
        (["results_dir=/dev/full/x"], "'/dev/full' is a file"),
        (["-m", "results_dir=a,b"], "a sweep writes to one results folder"),
        (["-m", "results_dir=/proc/x"], "cannot be written"),
        (["hydra.run.dir=/proc/x"], "hydra.run.dir '/proc/x' cannot be written"),
        (["hydra.run.dir=/dev/null"], "'/dev/null' is a file"),
        (["-m", "hydra.sweep.dir=/proc/x"], "hydra.sweep.dir '/proc/x' cannot be written"),
        (["-m", "hydra.sweep.subdir=/proc/x"], "hydra.sweep.subdir '/proc/x' cannot be written"),
        (["-m", "hydra.sweep.subdir=../x"], "hydra.sweep.subdir '../x' leaves the sweep's own folder"),
        (["hydra=3"], "hydra=3: Hydra's settings are set one by one"),
        (["skip_larger=[true]"], "skip_larger=[True] is not true or false"),
    ],
)
def test_odd_values_are_one_line_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, *WORDS]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbench: ") and error.count("\n") == 1 and line in error
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_a_temporary_folder_a_sweep_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    assert main(["-m", *WORDS]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbench: no temporary folder can be made (No space left on device)")
    assert error.count("\n") == 1 and list(tmp_path.iterdir()) == []
