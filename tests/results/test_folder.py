"""Writing run folders: each file is complete at any moment."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from kvbench.errors import UserError
from kvbench.files import write_atomic
from kvbench.results.folder import RunFolder, check_writable
from kvbench.results.loading import find_runs, load
from kvbench.results.run_files import read_status
from tests.shared.paths import ROOT
from tests.shared.rows import BASE, rows


def folder(where: Path, label: str = "full,H2O=1") -> RunFolder:
    return RunFolder.create(where, label, {"seed": 0}, {"command": "python -m kvbench"})


def test_name_needs_no_quoting(tmp_path: Path) -> None:
    run = folder(tmp_path, "compare=[full,H2O+int4], budget=0.5/x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d{6}_compare-full-h2o-int4-budget-0-5-x_[0-9a-f]{8}", run.path.name)
    assert re.fullmatch(r"[0-9_-]+_run_[0-9a-f]{8}", folder(tmp_path, "=,/").path.name)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({folder(tmp_path).path for _ in range(20)}) == 20
    assert len(list(tmp_path.iterdir())) == 20


def test_a_new_folder_is_complete_and_says_running(tmp_path: Path) -> None:
    config = {"method": ("full", "h2o"), "path": Path("a/b"), "nested": {"none": None}}
    run = RunFolder.create(tmp_path / "deep" / "er", "x", config, {"git": None}, key="k" * 64)
    assert sorted(file.name for file in run.path.iterdir()) == ["config.yaml", "provenance.json", "status.json"]
    text = (run.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == {"method": ["full", "h2o"], "path": "a/b", "nested": {"none": None}}
    assert "k" * 64 in text
    status = read_status(run.path)
    assert (status["status"], status["pid"], status["cells_done"]) == ("running", os.getpid(), 0)
    assert status["key"] == "k" * 64 and status["started"] and status["finished"] is None


def test_each_add_leaves_a_complete_table(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for count, measure in enumerate(("perplexity", "needle", "memory"), start=1):
        run.add(rows(measures=[measure]))
        frame = load(run.path)
        assert len(frame) == len(run.rows)
        assert set(frame["run"]) == {run.path.name}
        assert read_status(run.path)["cells_done"] == count * 8


def test_finish_records_the_error_and_keeps_the_rows(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.add(rows(measures=["memory"]))
    run.finish("failed", note="h2o", error="Traceback\nboom")
    status = read_status(run.path)
    assert (status["status"], status["note"], status["error"]) == ("failed", "h2o", "Traceback\nboom")
    assert status["finished"] >= status["started"]
    assert len(load(run.path)) == len(run.rows)
    with pytest.raises(ValueError, match="interrupted"):
        run.finish("done")


def test_samples_are_appended_line_by_line(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.add_samples([{"offset": 0, "nll": np.array([1.0, math.nan]), "hit": True}])
    run.add_samples([{"answer": "ünï\ncode"}])
    lines = (run.path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"offset": 0, "nll": [1.0, None], "hit": True},
        {"answer": "ünï\ncode"},
    ]


def test_a_crash_between_writing_and_renaming_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder(tmp_path)
    run.add([BASE])
    before = (run.path / "metrics.parquet").read_bytes()

    def crash(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            run.add([BASE, BASE])
    assert (run.path / "metrics.parquet").read_bytes() == before
    assert not list(run.path.glob(".*"))
    run.add([BASE])
    assert len(load(run.path)) == 2


def test_a_kill_between_writing_and_renaming_leaves_the_old_table(tmp_path: Path) -> None:
    """SIGKILL runs no handler: what stays is the old table and a hidden leftover, which nothing reads."""
    code = (
        "import os, signal, sys; from kvbench.results.folder import Row, RunFolder\n"
        f"run = RunFolder.create({str(tmp_path)!r}, 'x', {{}}, {{}}); run.add([Row(value=1.0)])\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run.add([Row(value=2.0)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    (run,) = tmp_path.iterdir()
    assert load(tmp_path)["value"].tolist() == [1.0]
    assert [file.suffix for file in run.glob(".*")] == [".tmp"]
    assert find_runs(tmp_path) == [run]


def test_write_atomic_honours_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_check_writable_makes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "not" / "there" / "yet")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/results", "x" * 300, "nul\0name"])
def test_unusable_results_folder_is_one_line(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError) as refused:
        RunFolder.create(tmp_path / where, "x", {}, {})
    assert "\n" not in str(refused.value) and "choose a folder that can be written" in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_results_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="Permission denied"):
        check_writable(tmp_path / "results")


def test_neither_results_nor_provenance_import_torch() -> None:
    code = (
        "import sys, kvbench.results.folder, kvbench.results.loading, kvbench.results.ledger\n"
        "import kvbench.results.resume_key as r, kvbench.results.provenance as p\n"
        "p.collect(); r.resume_key(model_revision='', config={}, data_fingerprint='', protocol='', dtype='')\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
