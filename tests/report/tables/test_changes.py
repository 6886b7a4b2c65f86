"""Changes between two sweeps: beyond intervals, new, gone, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.__main__ import main
from kvbench.report.tables.changes import changes
from kvbench.results.row import Row
from tests.report.synthetic import OOM, run_of
from tests.shared.rows import rows

Change = Callable[[Row], Row]


def changed(made: list[Row], method: str, metric: str, change: Change) -> list[Row]:
    return [change(row) if (row.method, row.store, row.metric) == (method, "dense", metric) else row for row in made]


def against_kinds(old: list[Row], new: list[Row]) -> list[tuple[str, str | None, str | None]]:
    return [(move.kind, move.row.method, move.row.metric) for move in changes(old, new)[0]]


def test_a_sweep_compared_with_itself_has_no_changes() -> None:
    found, same = changes(rows(), rows())
    assert found == [] and same == len({row for row in rows()})


def test_differences_beyond_the_interval_are_worse_or_better() -> None:
    old = rows(measures=["perplexity"])
    within = changed(old, "h2o", "nll_minus_full", lambda row: replace(row, value=row.value + 0.005))  # type: ignore[operator]
    assert against_kinds(old, within) == []
    for shift, kind in ((0.05, "worse"), (-0.05, "better")):
        beyond = changed(
            old,
            "h2o",
            "nll_minus_full",
            lambda row, by=shift: replace(row, value=row.value + by, low=row.low + by, high=row.high + by),  # type: ignore[misc]
        )
        assert against_kinds(old, beyond) == [(kind, "h2o", "nll_minus_full")]


def test_counted_numbers_need_no_interval_and_sampled_ones_do() -> None:
    old = rows(measures=["memory"], contexts=[512])
    bigger = changed(old, "h2o", "held_bytes", lambda row: replace(row, value=row.value + 1))  # type: ignore[operator]
    assert against_kinds(old, bigger) == [("worse", "h2o", "held_bytes")]
    old = rows(measures=["latency"], contexts=[512])
    slower = changed(old, "h2o", "tpot_p50_ms", lambda row: replace(row, value=row.value * 2))  # type: ignore[operator]
    assert against_kinds(old, slower) == [("no interval", "h2o", "tpot_p50_ms")]


def test_new_gone_and_failed_methods_are_one_line_each() -> None:
    old = rows(measures=["perplexity"])
    without = [row for row in old if row.method != "kivi2"]
    assert [kind for kind, *_ in against_kinds(old, without)] == ["gone"]
    assert [kind for kind, *_ in against_kinds(without, old)] == ["new"]
    failed = replace(OOM, status="failed", note="boom")
    assert [kind for kind, *_ in against_kinds([OOM], [failed])] == ["status"]


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = rows(measures=["perplexity", "memory"], contexts=[512])
    worse = changed(old, "h2o", "held_bytes", lambda row: replace(row, value=row.value + 1))  # type: ignore[operator]
    run_of(tmp_path / "old", old)
    run_of(tmp_path / "new", worse)
    assert main(["--against", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "worse" in printed and "held_bytes" in printed and "1 worse, " in printed
    folder = tmp_path / "new" / "against"
    assert {file.name for file in folder.iterdir()} == {"against.html", "against.md", "against.csv", "against.tex"}
    assert "held_bytes" in (folder / "against.html").read_text() and "| worse" in (folder / "against.md").read_text()
    assert main(["--against", str(tmp_path / "old"), str(tmp_path / "old"), "--out", str(tmp_path / "same")]) == 0
    assert "unchanged" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = str(tmp_path)
    for arguments in (["--against", "one"], ["--against", here, here], ["--against", "a", "b", "c"], []):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
