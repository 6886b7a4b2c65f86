"""`python -m kvbench.status`: what it prints and its exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbench.cli import status
from kvbench.cli.status import describe
from kvbench.results.claims import this_process
from kvbench.sweep.survey import survey
from tests.shared.sweep_files import made, ok, plan, record


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


def test_names_tell_what_varies(tmp_path: Path) -> None:
    records = [record("a", budget=16, window=8), record("b", budget=24, window=8), record("c", "kivi4", bits=4)]
    plan(tmp_path / "sweep_x", records)
    text = describe(survey(tmp_path / "sweep_x"))
    assert "h2o budget=16 perplexity 64" in text and "kivi4 perplexity 64" in text


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_nothing_to_survey_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    (tmp_path / "empty").mkdir()
    assert status.main([str(tmp_path / what)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m kvbench.status" in error


def test_status_imports_no_torch() -> None:
    code = "import sys, kvbench.status, kvbench.sweep.plan, kvbench.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
