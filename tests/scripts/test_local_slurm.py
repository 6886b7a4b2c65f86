"""scripts/local_slurm.sh stops its own daemons and no other process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared.paths import ROOT
from tests.shared.processes import sleeping


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of stand-ins for Slurm's programs: the daemons are copies of sleep, and `id` says root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sleep = shutil.which("sleep")
    assert sleep is not None
    for name in ("slurmctld", "slurmd", "munged", "scontrol"):
        shutil.copy(sleep, folder / name)
    (folder / "id").write_text("#!/bin/sh\necho 0\n")
    (folder / "id").chmod(0o755)
    return folder


def stop(home: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "KVBENCH_SLURM": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "scripts" / "local_slurm.sh"), "stop"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


def test_stale_pid_files_stop_no_other_process(
    tmp_path: Path, programs: Path, stranger: subprocess.Popen[bytes]
) -> None:
    home = tmp_path / "slurm"
    home.mkdir()
    for name in ("slurmctld.pid", "slurmd.node1.pid", "munged.pid"):
        (home / name).write_text(f"{stranger.pid}\n")
    (home / "slurmd.node2.pid").write_text("not a number\n")
    (home / "slurmd.node3.pid").write_text("-1\n")
    done = stop(home, programs)
    assert done.returncode == 0, done.stderr
    assert stranger.poll() is None
    assert not list(home.glob("*.pid"))


@pytest.mark.parametrize(
    ("name", "file"), [("slurmctld", "slurmctld.pid"), ("slurmd", "slurmd.node1.pid"), ("munged", "munged.pid")]
)
def test_its_own_daemons_are_stopped(tmp_path: Path, programs: Path, name: str, file: str) -> None:
    home = tmp_path / "slurm"
    home.mkdir()
    daemon = subprocess.Popen([programs / name, "100"])
    (home / file).write_text(f"{daemon.pid}\n")
    try:
        assert stop(home, programs).returncode == 0
        assert daemon.wait(timeout=10) == -15
    finally:
        daemon.kill()
        daemon.wait()
