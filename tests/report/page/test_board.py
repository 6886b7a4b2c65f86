"""kvbench.board: verified folders with who measured what where; all others with the reason and the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.page.board import main
from kvbench.results.verification import Check, VerifyRecord, content_hash, read_record, why_not_verified, write_record
from tests.shared.paths import ROOT

RUN = next((ROOT / "results" / "reference" / "methods").glob("*_full-bf16-*"))
"""A published run with gap closed."""
SOURCE: str = json.loads((RUN / "provenance.json").read_text())["source_hash"]


def record(run: Path, passed: bool = True) -> VerifyRecord:
    checks = [Check("rows", passed, "kl is 1, samples give 2")]
    return VerifyRecord(passed, content_hash(run), "a" * 64, True, True, [], 8, 624, False, "CPU", "2026-01-01", checks)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Four copies of a run: verified, failed, changed since then, never verified."""
    for name in ("good", "failed", "changed", "never"):
        shutil.copytree(RUN, tmp_path / name)
    for name in ("good", "failed", "changed"):
        write_record(tmp_path / name, record(tmp_path / name, passed=name != "failed"))
    with (tmp_path / "changed" / "samples.jsonl").open("a") as file:
        file.write("\n")
    (tmp_path / "good" / "who.txt").write_text("Ada, Paris\n")
    return tmp_path


def test_only_what_is_verified_is_on_the_board(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(results), "--who", "Bob"]) == 0
    assert "1 of 4 folders are verified" in capsys.readouterr().out
    verified, rest = (results / "board" / "board.md").read_text().split("## Not verified")
    assert "Ada, Paris" in verified and "Bob" not in verified
    line = next(line for line in verified.splitlines() if line.startswith("| h2o+bf16 ") and "append" not in line)
    for told in (
        "smollm2-135m",
        "1,024 tokens",
        "[",
        "AMD EPYC",
        "2026-12-01",
        SOURCE[:12],
        "8 of 624 samples, to the bit",
    ):
        assert told in line, line
    assert "verification failed: rows: kl is 1, samples give 2" in rest
    assert "changed since it was verified" in rest
    assert f"python -m kvbench.verify {results / 'never'}" in rest
    page = (results / "board" / "board.html").read_text()
    assert "Ada, Paris" in page and "http" not in page.replace("http://www.w3.org", "")


def test_numbers_are_those_of_the_rows(results: Path) -> None:
    """Sizes and intervals stand in the cells as the rows have them."""
    from kvbench.results.loading import load

    main([str(results / "good")])
    text = (results / "good" / "board" / "board.md").read_text()
    frame = load(results / "good")
    here = frame[(frame.method == "tova") & frame.dataset.str.contains("+", regex=False) & frame.position.isna()]
    value = {row.metric: row for row in here.itertuples()}
    line = next(line for line in text.splitlines() if line.startswith("| tova"))
    gap = value["gap_closed_kl"]
    assert f"{value['x_smaller'].value:.1f}x" in line
    assert f"{gap.value:.0%} [{gap.low:.0%}, {gap.high:.0%}]" in line


def test_a_damaged_record_counts_as_none(results: Path) -> None:
    (results / "good" / "verify.json").write_text('{"passed": "yes"}')
    with pytest.warns(UserWarning, match=r"verify\.json"):
        assert read_record(results / "good") is None
    with pytest.warns(UserWarning, match=r"verify\.json"):
        assert why_not_verified(results / "good") == "not verified"


def test_a_record_is_read_as_it_was_written(results: Path) -> None:
    written = replace(record(results / "never"), salted=True, differs=["the source"])
    write_record(results / "never", written)
    assert read_record(results / "never") == written


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "no FOLDER given"), (["a", "b"], "--out DIR"), (["/nosuch"], "no such file"), (["--x"], "type for example")],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_the_board_needs_no_torch() -> None:
    code = "import sys, kvbench.board\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
