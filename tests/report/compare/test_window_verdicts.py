"""Verdicts of methods against the full cache, from the windows of samples.jsonl."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.compare.comparison import is_baseline
from kvbench.report.compare.window_samples import WindowSample, read_samples
from kvbench.report.compare.window_verdicts import evidence_of, verdict_cell, verdict_record
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview
from kvbench.results.loading import find_runs, load
from kvbench.results.row import rows_of
from tests.report.synthetic import FULL, ONE, OTHER, cache, column, judged_groups, windows_of
from tests.shared.rows import BASE

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
ROW = replace(BASE, method="h2o", store="dense", budget=64.0, context=1024, protocol="prefill_decode")


def of(differences: list[float]) -> list[WindowSample]:
    return [WindowSample(ROW, str(place), each) for place, each in enumerate(differences)]


@pytest.mark.parametrize(
    ("differences", "cell"),
    [
        ([0.001, -0.001] * 8, "within margin"),
        ([0.004, 0.005] * 8, "within margin, with a loss"),
        ([0.1, 0.12] * 8, "worse"),
        ([0.1, 0.12] * 4, "not enough data (8 windows; at least 10 needed)"),
        ([0.1, -0.1] * 5, "not enough data (10 windows; about "),
    ],
)
def test_the_cell_names_the_verdict_and_the_windows_that_it_needs(differences: list[float], cell: str) -> None:
    found = evidence_of(of(differences)).verdict_of(ROW)
    assert found is not None and verdict_cell(found).startswith(cell)
    record = verdict_record(found)
    assert record["verdict_windows"] == len(differences) and record["verdict_margin"] == 0.01


def test_another_context_protocol_or_knob_has_no_verdict() -> None:
    evidence = evidence_of(of([0.1, 0.12] * 8))
    assert evidence.verdict_of(replace(ROW, metric="kl", measure="perplexity")) is not None
    for other in ({"context": 512}, {"protocol": "stream"}, {"budget": 32.0}, {"dtype": "bfloat16"}):
        assert evidence.verdict_of(replace(ROW, **other)) is None
    assert evidence.verdict_of(None) is None and verdict_cell(None) == "–" and verdict_record(None) == {}


def test_perplexity_and_overview_carry_the_verdicts_and_their_rule() -> None:
    rows = [*FULL, *cache("full", 20, 0.001, **ONE), *cache("full", 10, 0.2, **OTHER)]
    perplexity = next(
        table for table in build_tables(rows, None, evidence_of(windows_of(rows))) if table.name == "perplexity"
    )
    head = overview(judged_groups(rows))
    assert head is not None
    for table in (perplexity, head):
        assert column(table, "verdict") == ["–", "within margin", "worse"]
        assert any(part.startswith("verdict: within margin") and "0.01 nats" in part for part in table.caption)
        assert [record.get("verdict") for record in table.records] == [None, "within_margin", "worse"]
    without = overview(judged_groups(rows, windows=0))
    assert without is not None and "verdict" not in [one.key for one in without.columns]


@pytest.mark.parametrize("folder", ["methods", "budgets", "architecture", "first_light"])
def test_every_published_number_has_its_windows_and_fewer_than_ten_give_no_verdict(folder: str) -> None:
    runs = find_runs([REFERENCE / folder])
    evidence = evidence_of(read_samples(runs))
    numbers = [row for row in rows_of(load(REFERENCE / folder)) if row.metric == "nll_minus_full"]
    assert numbers
    kinds = set()
    for row in numbers:
        found = evidence.verdict_of(row)
        if is_baseline(row):
            continue
        assert found is not None and found.mean == pytest.approx(row.value, abs=1e-9)
        assert found.n >= 10 or found.kind == "not_enough_data"
        kinds.add(found.kind)
    enough = {"methods": {"within_margin", "worse", "not_enough_data"}, "budgets": {"worse", "not_enough_data"}}
    assert kinds == enough.get(folder, {"not_enough_data"})
