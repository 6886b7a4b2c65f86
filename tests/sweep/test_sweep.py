"""Sweeps: what is done is not done again, what died is found out, and nobody does another's work. No Slurm here."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.cli import status
from kvbench.cli.main import main
from kvbench.results import folder as results
from kvbench.results import run_files
from kvbench.results.folder import RunFolder
from kvbench.results.loading import load
from kvbench.results.row import Row
from kvbench.sweep.plan import sweep_name
from tests.shared.processes import owner_of, sleeping
from tests.shared.sweeping import FAULTS, TINY, cells_on_disk, complete, environment, rows, times_measured, wait_until

PPL = (*TINY, "measure=[perplexity]")


@pytest.fixture(autouse=True)
def no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVBENCH_TEST_SLEEP", "KVBENCH_TEST_ROOM", "KVBENCH_TEST_BYTES"):
        monkeypatch.delenv(name, raising=False)


def run(folder: Path, *words: str) -> int:
    return main([*words, f"results_dir={folder}"])


def runs(folder: Path) -> list[Path]:
    """The run folders, oldest first."""
    made = sorted(folder.rglob("config.yaml"), key=lambda file: file.stat().st_mtime_ns)
    return [file.parent for file in made if (file.parent / "status.json").exists()]


def measured(run_folder: Path) -> set[tuple[str | None, str | None]]:
    return {(row.method, row.measure) for row in rows(run_folder)}


# what is done is not done again


def test_the_same_command_measures_nothing_and_shows_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("method=h2o", "budget=16", *PPL)
    assert run(tmp_path, *words) == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert run(tmp_path, *words) == 0
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    output = capsys.readouterr().out
    (only,) = runs(tmp_path)
    assert "h2o" in output and "all 2 cells were measured before; rerun=all" in output
    assert f"measured in: {only}" in output


def test_a_sweep_measures_what_jobs_have_in_common_once(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", "method=full,kivi4,h2o", "budget=16,24", *PPL) == 0
    counts = times_measured(tmp_path)
    assert set(counts.values()) == {1}
    assert {(row.method, row.budget) for row in rows(tmp_path)} == {
        ("full", None),
        ("kivi4", None),
        ("h2o", 16),
        ("h2o", 24),
    }
    _, second = runs(tmp_path)
    assert measured(second) == {("h2o", "perplexity")}
    assert {row.metric for row in rows(second)} >= {"kl", "top1", "nll_minus_full"}  # the full cache ran beside it
    (sweep,) = tmp_path.iterdir() if not (tmp_path / ".claims").exists() else tmp_path.glob("sweep_*")
    plan = json.loads((sweep / "plan.json").read_text())
    assert len(plan["cells"]) == 4 and len(plan["jobs"]) == 2
    assert {json.loads(file.read_text())["code"] for file in sweep.glob("job_*.json")} == {0}


def test_pack_none_leaves_a_job_a_method(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", "method=full,h2o", "budget=16", "sweep.pack=none", *PPL) == 0
    (plan,) = tmp_path.rglob("plan.json")
    assert len(json.loads(plan.read_text())["jobs"]) == 2
    assert set(times_measured(tmp_path).values()) == {1}


def test_the_same_sweep_has_the_same_folder_whatever_launches_it() -> None:
    words = ["method=full,h2o", "budget=16,24"]
    again = ["-m", "hydra/launcher=slurm", "rerun=failed", "results_dir=x", *reversed(words)]
    assert sweep_name(words) == sweep_name(again)
    assert sweep_name(words) != sweep_name(["method=full,h2o", "budget=16,25"])


def test_rerun_all_measures_again_and_shared_cells_once(tmp_path: Path) -> None:
    words = ("-m", "method=full,h2o", "budget=16,24", *PPL)
    assert run(tmp_path, *words) == 0
    assert run(tmp_path, *words, "rerun=all") == 0
    assert set(times_measured(tmp_path).values()) == {2}


def test_contexts_are_cells_and_the_slope_follows_them(tmp_path: Path) -> None:
    latency = (*TINY, "method=full", "measure=[latency]")
    assert run(tmp_path, *latency, "latency.contexts=[32]") == 0
    assert run(tmp_path, *latency, "latency.contexts=[32,48]") == 0
    assert set(times_measured(tmp_path).values()) == {1}
    _, second = runs(tmp_path)
    assert {row.context for row in rows(second)} == {48, None}
    (slope,) = [row for row in rows(second) if row.metric == "slope_ms_per_1k"]
    # Which contexts it uses depends on whether this machine was steady; the note names all of them.
    assert slope.note is not None and "32" in slope.note and "48" in slope.note


# failures


def test_out_of_memory_is_a_result_and_what_is_larger_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (FAULTS, *TINY, "method=greedy", "measure=[latency]", "latency.contexts=[24,32,48]")
    monkeypatch.setenv("KVBENCH_TEST_ROOM", "28")
    assert run(tmp_path, *words) == 3
    bad = [(row.context, row.status) for row in rows(tmp_path) if row.status != "ok"]
    assert bad == [(32, "oom"), (48, "skipped")]
    (skipped,) = [row for row in rows(tmp_path) if row.status == "skipped"]
    assert skipped.note is not None and "out of memory at context 32" in skipped.note
    assert any("CUDA out of memory" in cell.get("traceback", "") for cell in cells_on_disk(tmp_path))
    assert "greedy latency 48" in capsys.readouterr().err

    monkeypatch.delenv("KVBENCH_TEST_ROOM")
    assert run(tmp_path, *words) == 3  # a result stays one
    assert len(runs(tmp_path)) == 1
    assert run(tmp_path, *words, "rerun=failed") == 0
    assert all(row.status == "ok" for row in rows(tmp_path))  # the failures are made good and gone
    assert set(times_measured(tmp_path).values()) == {1}
    assert status.main([str(tmp_path)]) == 0


def test_skip_larger_false_tries_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_TEST_ROOM", "28")
    words = (FAULTS, *TINY, "method=greedy", "measure=[latency]", "skip_larger=false")
    assert run(tmp_path, *words) == 3
    assert [(row.context, row.status) for row in rows(tmp_path) if row.status != "ok"] == [(32, "oom"), (48, "oom")]


def test_what_failed_is_tried_again_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (FAULTS, *TINY, "method=greedy", "measure=[perplexity]")
    monkeypatch.setenv("KVBENCH_TEST_ROOM", "not a number")
    assert run(tmp_path, *words) == 3
    assert [row.status for row in rows(tmp_path) if row.method == "greedy"] == ["failed"]
    monkeypatch.delenv("KVBENCH_TEST_ROOM")
    assert run(tmp_path, *words) == 0
    assert all(row.status == "ok" for row in rows(tmp_path))
    _, second = runs(tmp_path)
    assert measured(second) == {("greedy", "perplexity")}


HUNGRY = """
import resource, sys
import torch
import kvbench.run
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (held + 400_000_000,) * 2)
from kvbench.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_real_limit_on_memory_is_a_result(tmp_path: Path) -> None:
    words = (FAULTS, *TINY, "method=hungry", "measure=[latency]", "latency.contexts=[24,32,48]")
    limited = subprocess.run(
        [sys.executable, "-c", HUNGRY, *words, f"results_dir={tmp_path}"],
        capture_output=True,
        text=True,
        env=environment(KVBENCH_TEST_BYTES="25000000"),
    )
    assert limited.returncode == 3, limited.stderr
    bad = {(row.context, row.status) for row in rows(tmp_path) if row.method == "hungry" and row.status != "ok"}
    assert bad == {(24, "oom"), (32, "skipped"), (48, "skipped")}, limited.stderr
    assert run(tmp_path, *words, "rerun=failed") == 0
    assert set(times_measured(tmp_path).values()) == {1}


def test_a_full_disk_is_one_line_and_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, full = results.write_atomic, threading.Event()

    def until_full(path: Path, content: bytes | str) -> None:
        full.set() if path.name == "samples.jsonl" else None
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    words = ("method=h2o", "budget=16", *PPL)
    monkeypatch.setattr(results, "write_atomic", until_full)
    assert run(tmp_path, *words) == 3
    assert "is full (No space left on device)" in capsys.readouterr().err
    assert rows(tmp_path) == []
    monkeypatch.setattr(results, "write_atomic", write)
    assert main([*words, "rerun=null", f"results_dir={tmp_path}"]) in (0, 3)


def test_rows_that_the_status_does_not_count_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"id": "a", "key": "k", "kind": "i", "method": "full", "measure": "perplexity", "context": 32}
    folder = RunFolder.create(tmp_path, "x", {}, {}, cells=[record])
    write = results.write_atomic

    def killed_before_status(path: Path, content: bytes | str) -> None:
        if path.name == "status.json":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(results, "write_atomic", killed_before_status)
    with pytest.raises(KeyboardInterrupt):
        folder.update_cells({"a": ([Row(method="full", value=1.0)], {"status": "ok"})})
    monkeypatch.undo()
    assert (folder.path / "metrics.parquet").exists() and len(load(tmp_path)) == 0
    folder.update_cells({"a": ([Row(method="full", value=2.0)], {"status": "ok"})})
    assert list(load(tmp_path)["value"]) == [2.0]


# being stopped


def test_sigterm_marks_what_was_running_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (FAULTS, *TINY, "method=slow", "measure=[perplexity,latency]")

    def slow_now() -> bool:
        return any(c["status"] == "running" and c["measure"] == "latency" for c in cells_on_disk(tmp_path))

    def terminate_in_the_middle() -> None:
        wait_until(slow_now)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("KVBENCH_TEST_SLEEP", "0.5")
    killer = threading.Thread(target=terminate_in_the_middle)
    killer.start()
    code = run(tmp_path, *words)
    killer.join()
    assert code == 143
    states = Counter((cell["measure"], cell["status"]) for cell in cells_on_disk(tmp_path))
    assert states["perplexity", "ok"] == 2 and states["latency", "interrupted"] == 6
    assert not list((tmp_path / ".claims").glob("*.json"))
    monkeypatch.delenv("KVBENCH_TEST_SLEEP")
    assert run(tmp_path, *words) == 0
    assert set(times_measured(tmp_path).values()) == {1}
    assert {row.measure for row in rows(runs(tmp_path)[1])} == {"latency"}


def test_a_killed_run_keeps_its_cells_and_is_found_out(tmp_path: Path) -> None:
    from tests.shared.sweeping import at_work, start

    words = (FAULTS, *TINY, "method=slow", "measure=[perplexity,latency]")
    process = start(*words, f"results_dir={tmp_path}", KVBENCH_TEST_SLEEP="1")
    wait_until(lambda: at_work(tmp_path, "slow"), process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (first,) = runs(tmp_path)
    assert json.loads((first / "status.json").read_text())["status"] == "running"
    assert run_files.read_status(first)["status"] == "interrupted"
    assert status.main([str(tmp_path)]) == 3
    assert run(tmp_path, *words) == 0
    assert set(times_measured(tmp_path).values()) == {1}
    assert ("slow", "perplexity") in measured(first) and ("slow", "perplexity") not in measured(runs(tmp_path)[1])


# claims


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


def test_a_cell_that_another_has_is_left_to_it(
    tmp_path: Path, stranger: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("method=h2o", "budget=16", *PPL)
    assert run(tmp_path / "first", *words) == 0
    key = next(c["key"] for c in cells_on_disk(tmp_path / "first") if c["method"] == "h2o")
    second = tmp_path / "second"
    (second / ".claims").mkdir(parents=True)
    claim = second / ".claims" / f"{key[:32]}.json"
    claim.write_text(json.dumps({"owner": owner_of(stranger.pid), "run": "theirs"}))
    assert run(second, *words) == 3
    error = capsys.readouterr().err
    assert f"another process has it: pid {stranger.pid} on" in error and "in theirs, holds it until that" in error
    assert measured(second) == {("full", "perplexity")}
    assert claim.exists()
    stranger.kill()
    stranger.wait()
    assert run(second, *words) == 0
    assert set(times_measured(second).values()) == {1}


def test_two_commands_at_once_share_the_cells(tmp_path: Path) -> None:
    words = ("-m", FAULTS, *TINY, "method=slow", "sinks=1,2", "measure=[perplexity,latency]", f"results_dir={tmp_path}")
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(complete(*words, KVBENCH_TEST_SLEEP="0.2")[0])) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {0, 3}
    assert set(times_measured(tmp_path).values()) == {1}
    assert main([*words]) == 0
    assert set(times_measured(tmp_path).values()) == {1}
    assert status.main([str(tmp_path)]) == 0


# what is refused


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("-m", "method=h2o,h3o", "budget=16"), "method=h3o is unknown"),
        (("-m", "budget=16,24", "bugdet=3"), "bugdet is no setting"),
        (("-m", "rerun=none"), "rerun=none is unknown"),
        (("-m", "hydra/sweeper=optuna"), "hydra/sweeper= is not supported"),
        (("rerun=none",), "rerun=none is unknown"),
        (("skip_larger=2",), "skip_larger=2 is not true or false"),
        (("hydra/launcher=joblib",), "joblib"),
    ],
)
def test_unusable_words_launch_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    assert run(tmp_path, *words, *PPL) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbench: ") and error.count("\n") == 1 and line in error
    assert list(tmp_path.iterdir()) == []


def test_one_unusable_job_costs_the_others_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "-m", "compare=[h2o]", "budget=0,16", *PPL) == 2
    assert "refused" in capsys.readouterr().out
    assert ("h2o", "perplexity") in measured(tmp_path)
    assert status.main([str(tmp_path)]) == 3
