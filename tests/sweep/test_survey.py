"""What became of the cells of a sweep, from files alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvbench.cli import status
from kvbench.cli.status import duration
from kvbench.files import to_json, write_atomic
from kvbench.results.claims import this_process
from kvbench.sweep.survey import survey
from tests.shared.sweep_files import made, ok, plan, record


def test_complete_is_zero_wherever_the_cells_were_measured(tmp_path: Path) -> None:
    records = [record("a"), record("b")]
    plan(tmp_path / "sweep_x", records)
    made(tmp_path / "sweep_x", records[:1], a=ok())
    made(tmp_path / "sweep_y", records[1:], b=ok())  # by another sweep in the same results folder
    assert status.main([str(tmp_path / "sweep_x")]) == 0
    assert status.main([str(tmp_path)]) == 0


def test_a_run_whose_process_is_gone_is_interrupted(tmp_path: Path) -> None:
    folder = made(tmp_path, [record("a")], a={"status": "running", "started": time.time()})
    assert [cell.status for cell in survey(tmp_path).cells] == ["running"]
    content = json.loads((folder.path / "status.json").read_text())
    content["owner"]["start"] = "1"  # the pid has gone to another process since
    write_atomic(folder.path / "status.json", to_json(content))
    assert [cell.status for cell in survey(tmp_path).cells] == ["interrupted"]


def test_a_later_attempt_counts(tmp_path: Path) -> None:
    made(tmp_path, [record("a")], a={"status": "failed", "note": "x", "finished": 1.0})
    made(tmp_path, [record("a")], a=ok())
    assert status.main([str(tmp_path)]) == 0


def test_rerun_all_counts_only_what_came_after_it_began(tmp_path: Path) -> None:
    plan(tmp_path / "sweep_x", [record("a")], rerun="all", started=time.time() + 60)
    made(tmp_path / "sweep_x", [record("a")], a=ok())
    assert [cell.status for cell in survey(tmp_path / "sweep_x").cells] == ["missing"]


def test_jobs_that_were_refused_or_died_are_named(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep_x"
    plan(sweep, [record("a")])
    begun = {"overrides": ["method=h2o"], "started": time.time()}
    died = begun | {"owner": this_process() | {"start": "1"}, "code": None}
    write_atomic(sweep / "job_1.json", to_json(died))
    found = survey(sweep)
    assert found.died and [cell.status for cell in found.cells] == ["missing"]
    refused = begun | {"owner": this_process(), "code": 2, "error": "budget=0 is not a budget", "finished": time.time()}
    write_atomic(sweep / "job_1.json", to_json(refused))
    assert survey(sweep).refused == ["method=h2o: budget=0 is not a budget"]
    assert status.main([str(sweep)]) == 3


def test_time_left_is_judged_by_the_like(tmp_path: Path) -> None:
    records = [record("a"), record("b"), record("c", measure="latency"), record("d", measure="latency")]
    plan(tmp_path / "sweep_x", records)
    made(
        tmp_path / "sweep_x", records, a=ok(2.0), c=ok(100.0), b={"status": "interrupted"}, d={"status": "interrupted"}
    )
    assert survey(tmp_path / "sweep_x").seconds_left() == pytest.approx(102.0)
    assert [duration(seconds) for seconds in (40, 720, 12600)] == ["40 s", "12 min", "3.5 h"]
