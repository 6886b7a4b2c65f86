"""`python -m kvbench.report`: whole, partial and failed runs, and bad input."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.__main__ import main
from kvbench.report.page.write import write_report
from kvbench.results.row import Row
from tests.report.synthetic import OOM, run_of
from tests.shared.paths import ROOT
from tests.shared.rows import BASE, METHODS, rows


def test_report_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, rows())
    assert main([str(run.path)]) == 0
    page = run.path / "report" / "report.md"
    assert capsys.readouterr().out.strip() == str(page.with_suffix(".html"))
    text = page.read_text()
    assert text.startswith("# KV cache comparison: Toy-135M\n")
    assert "python -m kvbench 'compare=[full,h2o]'" in text and "None: every method evicted or quantised" in text
    for file in (page, page.with_name("details.md")):
        linked = [word.split(")")[0] for word in file.read_text().split("](")[1:]]
        assert linked and all((page.parent / name).stat().st_size > 0 for name in linked)
    with open(page.parent / "perplexity.csv") as file:
        records = list(csv.DictReader(file))
    assert float(records[0]["ppl"]) == 22.31 and records[0]["model"] == "org/Toy-135M"
    assert {record["method_shown"] for record in records} == {"full", "h2o+int4", *(m for m, *_ in METHODS)}
    assert main([str(run.path)]) == 0  # and again over the old one, which is no run


def test_report_of_a_sweep_with_failed_and_running_cells(tmp_path: Path) -> None:
    run_of(tmp_path / "sweep", rows(measures=["perplexity"]))
    run_of(tmp_path / "sweep", [OOM], status="failed")
    run_of(tmp_path / "sweep", [], status="running")
    assert main([str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    for expected in ("3 runs", "**run failed**", "it broke", "**still running**", "**oom**", "tried 2 GiB", "22.31"):
        assert expected in text


def test_report_of_runs_without_any_row(tmp_path: Path) -> None:
    run = run_of(tmp_path, [], status="failed")
    assert main([str(run.path)]) == 0
    assert "it broke" in (run.path / "report" / "report.md").read_text()


def test_notes_and_errors_are_escaped(tmp_path: Path) -> None:
    run = run_of(tmp_path, [replace(OOM, note="<script> | **x** [a](b) `c`")])
    assert main([str(run.path)]) == 0
    text = (run.path / "report" / "report.md").read_text()
    assert "<script>" not in text.replace("\\<script>", "") and "[a](b)" not in text


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "runs", rows(measures=["memory"]))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        ([], "PATH"),
        ([tmp_path / "nowhere"], "no such file or folder"),
        ([tmp_path / "empty"], "no run folder in"),
        ([tmp_path / "file"], "neither a run folder nor"),
        ([run.path, run.path], "--out DIR"),
        ([run.path, "--out", tmp_path / "file"], "is a file"),
        ([run.path, "--pdf"], "--pdf"),
    ):
        assert main([str(word) for word in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_module_call_without_arguments_and_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.report"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "python -m kvbench.report" in done.stderr
    run = run_of(tmp_path, rows())
    code = (
        "import sys; from kvbench.report.__main__ import main\n"
        f"assert main([{str(run.path)!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def many(count: int) -> Sequence[Row]:
    models = itertools.count()
    made: list[Row] = []
    while len(made) < count:
        made += rows(base=replace(BASE, model=f"org/Model-{next(models)}"))
    return made


@pytest.mark.slow
def test_ten_thousand_rows_take_less_than_twenty_seconds(tmp_path: Path) -> None:
    run = run_of(tmp_path, many(10_000))
    before = time.process_time()
    page = write_report([run.path], tmp_path / "report")
    assert time.process_time() - before < 20
    assert page.stat().st_size > 1_000_000
