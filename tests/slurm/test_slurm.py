"""Sweeps through a real Slurm, and what may happen to them. scripts/test_slurm.sh starts one and runs these."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.cli import status
from kvbench.sweep.survey import survey
from tests.shared.sweeping import (
    FAULTS,
    TINY,
    always_whole,
    at_work,
    cells_on_disk,
    complete,
    rows,
    start,
    times_measured,
    wait_until,
)

pytestmark = pytest.mark.slurm

SLURM = ("-m", "hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=10", FAULTS)
SLOW = (*SLURM, *TINY, "method=slow", "sinks=1,2,3", "measure=[perplexity,latency]")
CELLS = 4 * 4  # full and three slow ones; perplexity, two contexts of latency and the slope
WAITS = {"KVBENCH_TEST_SLEEP": "2"}


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "results"
    for job in subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True).stdout.split():
        subprocess.run(["scancel", "-f", "-s", "KILL", job], capture_output=True)


def sweep_of(results: Path) -> Path:
    (folder,) = results.glob("sweep_*")
    return folder


def assert_complete(results: Path, cells: int = CELLS) -> None:
    measured = times_measured(results)
    assert set(measured.values()) == {1}, {key: count for key, count in measured.items() if count > 1}
    found = survey(sweep_of(results))
    assert len(found.cells) == cells and found.complete, status.describe(found)
    assert sum(cell["status"] == "ok" for cell in cells_on_disk(results)) == cells
    assert status.main([str(results)]) == 0
    assert not list((results / ".claims").glob("*.json"))


def again(results: Path, *words: str, **variables: str) -> str:
    """The same command completes the set."""
    code, output = complete(*words, f"results_dir={results}", **variables)
    assert code == 0, output
    return output


def test_a_sweep_is_complete_and_a_second_one_measures_nothing(results: Path, tmp_path: Path) -> None:
    with always_whole(results, tmp_path / "report") as faults:
        again(results, *SLOW)
    assert not faults
    assert_complete(results)
    assert (tmp_path / "report" / "report.md").is_file()
    folders = sorted(results.rglob("status.json"))
    output = again(results, *SLOW)
    assert f"{CELLS} cells: {CELLS} done" in output
    assert sorted(results.rglob("status.json")) == folders


def hit_in_the_middle(results: Path, report: Path, act: str) -> str:
    """Run the slow sweep and do `act` to a worker that is in the middle; the output of the command."""
    with always_whole(results, report) as faults:
        sweep = start(*SLOW, f"results_dir={results}", **WAITS)
        run = wait_until(lambda: at_work(results, "slow"), process=sweep)
        pid = int(run["owner"]["pid"])
        if act == "scancel":
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            known = dict(entry.decode().split("=", 1) for entry in environment if b"=" in entry)
            job = f"{known['SLURM_ARRAY_JOB_ID']}_{known['SLURM_ARRAY_TASK_ID']}"
            subprocess.run(["scancel", job], check=True)
        else:
            os.kill(pid, getattr(signal, act))
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        states = {cell["status"] for cell in cells_on_disk(results)}
        assert "ok" in states
        assert status.main([str(results)]) == 3  # while the others run, from our own files alone
        output, _ = sweep.communicate(timeout=300)
    assert not faults
    assert sweep.returncode == 3, output
    return output


@pytest.mark.parametrize("act", ["SIGKILL", "scancel", "SIGTERM"])
def test_after_a_worker_is_stopped_the_same_command_completes_the_set(results: Path, tmp_path: Path, act: str) -> None:
    output = hit_in_the_middle(results, tmp_path / "report", act)
    assert "interrupted" in output or "missing" in output
    kept = [cell["key"] for cell in cells_on_disk(results) if cell["status"] == "ok"]
    again(results, *SLOW)
    assert_complete(results)
    assert sorted(kept) == sorted(set(kept))


def test_a_job_whose_time_is_up_is_queued_again_and_goes_on(results: Path, tmp_path: Path) -> None:
    with always_whole(results, tmp_path / "report") as faults:
        sweep = start(*SLOW, f"results_dir={results}", **WAITS)
        run = wait_until(lambda: at_work(results, "slow"), process=sweep)
        os.kill(int(run["owner"]["pid"]), signal.SIGUSR2)  # what Slurm sends signal_delay_s before the end
        output, _ = sweep.communicate(timeout=400)
    assert not faults
    assert sweep.returncode == 0, output
    assert_complete(results)


def test_two_sweeps_in_one_folder_share_the_work(results: Path, tmp_path: Path) -> None:
    with always_whole(results, tmp_path / "report") as faults:
        sweeps = [start(*SLOW, f"results_dir={results}", KVBENCH_TEST_SLEEP="0.3") for _ in range(2)]
        outputs = [sweep.communicate(timeout=300)[0] for sweep in sweeps]
    assert not faults
    assert all(sweep.returncode in (0, 3) for sweep in sweeps), outputs
    assert set(times_measured(results).values()) == {1}
    again(results, *SLOW)
    assert_complete(results)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "kvbench-test", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_costs_what_could_not_be_written_and_nothing_else(small_disk: Path, tmp_path: Path) -> None:
    results = small_disk / "results"
    ballast = small_disk / "ballast"
    with always_whole(results, tmp_path / "report") as faults:
        sweep = start(*SLOW, f"results_dir={results}", **WAITS)
        wait_until(lambda: len(list(results.rglob("job_*.json"))) == 3, process=sweep)
        wait_until(lambda: at_work(results, "slow"), process=sweep)
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError:
                assert shutil.disk_usage(small_disk).free == 0
        output, _ = sweep.communicate(timeout=300)
    assert not faults
    assert sweep.returncode == 3, output
    logs = "".join(file.read_text() for file in results.rglob("*_log.err"))
    assert "is full" in logs + output
    assert set(times_measured(results).values()) == {1}
    ballast.unlink()
    again(results, *SLOW)
    assert_complete(results)


def test_running_out_of_gpu_memory_is_a_result_and_larger_cells_are_skipped(results: Path, tmp_path: Path) -> None:
    words = (*SLURM, *TINY, "method=greedy", "sinks=1,2", "measure=[latency,perplexity]", "latency.contexts=[24,32,48]")
    with always_whole(results, tmp_path / "report") as faults:
        code, output = complete(*words, f"results_dir={results}", KVBENCH_TEST_ROOM="28")
    assert not faults
    assert code == 3, output
    found = [(row.context, row.status) for row in rows(results) if row.method == "greedy" and row.status != "ok"]
    assert sorted(set(found)) == [(32, "oom"), (48, "oom"), (48, "skipped")]  # the second oom is perplexity's
    assert any("CUDA out of memory" in cell.get("traceback", "") for cell in cells_on_disk(results))
    before = sorted(results.rglob("status.json"))
    code, output = complete(*words, f"results_dir={results}")
    assert code == 3 and sorted(results.rglob("status.json")) == before  # results, as they stand
    again(results, *words, "rerun=failed")
    assert all(row.status == "ok" for row in rows(results))
    assert survey(sweep_of(results)).complete
