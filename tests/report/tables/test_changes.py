"""Changes between two sweeps: beyond intervals, new, gone, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.__main__ import main
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence, evidence_of
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


def sweep_of(shift: float, windows: int = 16, noise: float = 0.002) -> tuple[list[Row], WindowEvidence]:
    """Perplexity rows of full and h2o, with windows in which h2o lost `shift` nats more than 0.1."""
    made = [row for row in rows(measures=["perplexity"]) if row.method in ("full", "h2o") and row.store == "dense"]
    pick, samples = random.Random(str(shift)), []
    for row in (row for row in made if row.metric == "nll_minus_full"):
        for place in range(windows):
            loss = 0.0 if row.method == "full" else 0.1 + shift + pick.gauss(0, noise)
            scores = {"nll": 3 + 0.3 * place + loss, "kl": abs(loss), "top1": 0.9}
            samples.append(WindowSample(row, str(place), loss, None, scores))
    return changed(made, "h2o", "nll_minus_full", lambda row: replace(row, value=0.1 + shift)), evidence_of(samples)


@pytest.mark.parametrize(
    ("shift", "windows", "kind"),
    [(0.01, 16, "worse"), (-0.01, 16, "better"), (0.0001, 16, None), (0.05, 9, "no verdict"), (0.002, 9, None)],
)
def test_losses_are_compared_over_shared_windows_and_below_ten_there_is_no_verdict(
    shift: float, windows: int, kind: str | None
) -> None:
    """The intervals of the rows, 0.02 wide, decide nothing."""
    (old, before), (new, after) = sweep_of(0.0, windows), sweep_of(shift, windows)
    found = {(move.row.metric, move.kind) for move in changes(old, new, None, (before, after))[0]}
    assert found == (set() if kind is None else {("nll_minus_full", kind)})


def test_windows_of_other_text_give_no_verdict() -> None:
    (old, before), (new, after) = sweep_of(0.0), sweep_of(0.05)
    elsewhere = evidence_of(
        WindowSample(method.row, f"other {name}", each)
        for method in after.windows.values()
        for name, each in method.differences.items()
    )
    for evidence in (elsewhere, NO_EVIDENCE):
        (move,) = changes(old, new, None, (before, evidence))[0]
        assert (move.kind, move.row.metric) == ("no verdict", "nll_minus_full")


def test_counted_numbers_need_no_interval_and_sampled_ones_do() -> None:
    old = rows(measures=["memory"], contexts=[512])
    bigger = changed(old, "h2o", "held_bytes", lambda row: replace(row, value=row.value + 1))  # type: ignore[operator]
    assert against_kinds(old, bigger) == [("worse", "h2o", "held_bytes")]
    old = rows(measures=["latency"], contexts=[512])
    slower = changed(old, "h2o", "tpot_p50_ms", lambda row: replace(row, value=row.value * 2))  # type: ignore[operator]
    assert against_kinds(old, slower) == [("no verdict", "h2o", "tpot_p50_ms")]
    narrow = [replace(row, low=29.0, high=31.0) if row.metric == "tpot_p50_ms" else row for row in (*old, *slower)]
    kinds = against_kinds(narrow[: len(old)], narrow[len(old) :])
    assert kinds == [("no verdict", "h2o", "tpot_p50_ms")]  # of another process, whatever the interval


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
