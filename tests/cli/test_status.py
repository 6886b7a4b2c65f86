"""`python -m kvbench.status` from files alone: what is done, at work, failed and missing, and the time left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import status
from kvbench.cli.status import describe, duration
from kvbench.files import to_json, write_atomic
from kvbench.results.claims import this_process
from kvbench.results.folder import RunFolder
from kvbench.results.row import Row
from kvbench.sweep.survey import survey


def record(
    name: str, method: str = "h2o", measure: str = "perplexity", context: int = 64, **knobs: Any
) -> dict[str, Any]:
    return {
        "id": name,
        "key": name * 8,
        "kind": name,
        "method": method,
        "knobs": knobs,
        "measure": measure,
        "context": context,
    }


def plan(folder: Path, records: list[dict[str, Any]], **more: Any) -> None:
    folder.mkdir(parents=True)
    jobs = [{"overrides": ["method=h2o"], "cells": [r["id"] for r in records], "refused": None}]
    content = {"command": ["python"], "started": time.time() - 60, "rerun": None, "results": "..", "jobs": jobs}
    write_atomic(folder / "plan.json", to_json({**content, "cells": records, **more}))


def made(where: Path, records: list[dict[str, Any]], **states: dict[str, Any]) -> RunFolder:
    folder = RunFolder.create(where, "x", {}, {}, cells=records)
    folder.update_cells(
        {
            name: ([Row(method="h2o", value=1.0)] if fields["status"] == "ok" else [], fields)
            for name, fields in states.items()
        }
    )
    return folder


def ok(seconds: float = 10.0) -> dict[str, Any]:
    return {"status": "ok", "seconds": seconds, "finished": time.time()}


def test_every_state_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(name) for name in "abcdef"]
    plan(tmp_path / "sweep_x", records)
    made(
        tmp_path / "sweep_x",
        records[:5],
        a=ok(),
        b={"status": "running", "started": time.time() - 5},
        c={"status": "failed", "note": "ValueError: no"},
        d={"status": "oom", "note": "out of memory"},
        e={"status": "interrupted"},
    )
    assert status.main([str(tmp_path / "sweep_x")]) == 3
    output = capsys.readouterr().out
    assert "6 cells: 1 done, 1 out of memory, 1 running, 1 failed, 1 interrupted, 1 missing; about 40 s left" in output
    assert "ValueError: no" in output
    assert f"pid {this_process()['pid']}" in output


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


def test_names_tell_what_varies(tmp_path: Path) -> None:
    records = [record("a", budget=16, window=8), record("b", budget=24, window=8), record("c", "kivi4", bits=4)]
    plan(tmp_path / "sweep_x", records)
    text = describe(survey(tmp_path / "sweep_x"))
    assert "h2o budget=16 perplexity 64" in text and "kivi4 perplexity 64" in text


def test_time_left_is_judged_by_the_like(tmp_path: Path) -> None:
    records = [record("a"), record("b"), record("c", measure="latency"), record("d", measure="latency")]
    plan(tmp_path / "sweep_x", records)
    made(
        tmp_path / "sweep_x", records, a=ok(2.0), c=ok(100.0), b={"status": "interrupted"}, d={"status": "interrupted"}
    )
    assert survey(tmp_path / "sweep_x").seconds_left() == pytest.approx(102.0)
    assert [duration(seconds) for seconds in (40, 720, 12600)] == ["40 s", "12 min", "3.5 h"]


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_nothing_to_survey_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    (tmp_path / "empty").mkdir()
    assert status.main([str(tmp_path / what)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m kvbench.status" in error


def test_status_imports_no_torch() -> None:
    code = "import sys, kvbench.status, kvbench.sweep.plan, kvbench.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
