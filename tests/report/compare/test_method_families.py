"""Methods are compared with each other within one budget and decode mode, on the same windows, from 10 windows on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.report.compare.window_samples import WindowSample, read_samples
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.figures.pair_heat_maps import pair_heat_maps
from kvbench.report.page.table_files import written_forms
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_pairs import method_pairs_table
from kvbench.results.loading import find_runs
from kvbench.results.row import Row
from tests.report.synthetic import column, rival_samples
from tests.shared.rows import BASE

LOSSES = {"h2o": 0.1, "tova": 0.1005, "random": 0.3}
REFERENCE = Path(__file__).parents[3] / "results" / "reference" / "architecture"


def test_the_best_are_those_that_cannot_be_told_apart() -> None:
    evidence = evidence_of(rival_samples(32, LOSSES))
    (family,) = evidence.families
    assert family.labels == ("h2o", "tova", "random") and sorted(family.best) == [0, 1]
    assert not family.differ(0, 1) and family.differ(0, 2) and family.differ(1, 2)
    marked = [evidence.is_best(row) for row in family.rows]
    assert marked == [True, True, False]
    assert evidence.best_text()[0].startswith("bold ΔNLL")


def test_nothing_is_marked_where_no_two_differ_or_windows_are_too_few() -> None:
    alike = evidence_of(rival_samples(32, {"h2o": 0.1, "tova": 0.1001}))
    assert len(alike.families) == 1 and not alike.best
    assert alike.best_text() == ["no method is marked as best: no two differ by paired tests over windows"]
    few = evidence_of(rival_samples(9, LOSSES))
    assert not few.families and not few.best
    assert few.best_text() == ["no method is marked as best: 9 windows, 10 needed to compare methods"]
    assert evidence_of([]).best_text() == []
    alone = evidence_of(rival_samples(32, {"h2o": 0.1})).best_text()
    assert alone == ["no method is marked as best: no 2 to 100 methods share budget, decode mode and windows"]
    assert method_pairs_table(few.families) is None and pair_heat_maps(few.families) is None


def test_published_reports_of_few_windows_compare_no_methods() -> None:
    evidence = evidence_of(read_samples(find_runs([REFERENCE])))
    assert not evidence.families and evidence.best_text()[0].startswith("no method is marked as best: 4 windows")


@pytest.mark.parametrize("other", [{"budget": 128.0}, {"knobs": '{"decode": "append"}'}, {"dtype": "bfloat16"}])
def test_methods_of_another_budget_decode_mode_or_model_are_not_compared(other: dict[str, object]) -> None:
    def changed(row: Row) -> Row:
        return replace(row, **other) if row.method == "random" else row  # type: ignore[arg-type]

    samples = [replace(sample, row=changed(sample.row)) for sample in rival_samples(32, LOSSES)]
    (family,) = evidence_of(samples).families
    assert {row.method for row in family.rows} == {"h2o", "tova"}


def test_methods_on_other_windows_are_not_compared() -> None:
    samples = rival_samples(32, LOSSES)
    one_less = [sample for sample in samples if not (sample.row.method == "tova" and sample.window == "3")]
    (family,) = evidence_of(one_less).families
    assert {row.method for row in family.rows} == {"h2o", "random"}


def test_windows_are_paired_by_their_text_not_by_their_order() -> None:
    samples = rival_samples(32, LOSSES)
    (one,), (other,) = evidence_of(samples).families, evidence_of(_reversed_tova(samples)).families
    assert np.allclose(one.matrix.p[0, 2], other.matrix.p[0, 1]) or set(one.labels) == set(other.labels)
    places = [other.labels.index(label) for label in one.labels]
    assert np.array_equal(one.matrix.p, other.matrix.p[np.ix_(places, places)])


def _reversed_tova(samples: list[WindowSample]) -> list[WindowSample]:
    tova = [sample for sample in samples if sample.row.method == "tova"]
    return [*(sample for sample in samples if sample.row.method != "tova"), *reversed(tova)]


def test_the_table_names_the_better_method_first_and_writes_unrounded_numbers() -> None:
    evidence = evidence_of(rival_samples(32, LOSSES))
    table = method_pairs_table(evidence.families)
    assert table is not None and table.height == 3
    keys = ("method", "other", "verdict")
    lines = zip(*(column(table, key) for key in keys), strict=True)
    found = {(method, other): verdict for method, other, verdict in lines}
    assert found["h2o", "random"] == "h2o is better" and found["tova", "random"] == "tova is better"
    assert sorted(found.values())[0] == "cannot be told apart"
    assert all(record["difference"] <= 0 and 0 <= record["p"] <= 1 for record in table.records)
    assert {record["windows"] for record in table.records} == {32}
    assert set(written_forms(table)) == {"csv", "parquet", "md", "tex"}


def test_the_perplexity_table_marks_the_best_and_a_heat_map_shows_every_pair() -> None:
    samples = rival_samples(32, LOSSES)
    rows = [
        replace(row, measure="perplexity", metric=metric, value=LOSSES[str(row.method)], unit="nats", low=0.0, high=0.5)
        for row in {sample.row for sample in samples}
        for metric in ("nll_minus_full", "kl")
    ]
    rows.insert(0, replace(BASE, method="full", store="dense", measure="perplexity", metric="ppl", value=9.0))
    evidence = evidence_of(samples)
    table, pairs = build_tables(rows, None, evidence)[:2]
    loss = next(one for one in table.columns if one.key == "nll_minus_full")
    names = column(table, "method")
    assert {names[place] for place in loss.best} == {"h2o", "tova"} and pairs.name == "method_pairs"
    assert not next(one for one in table.columns if one.key == "kl").best
    plot = pair_heat_maps(evidence.families)
    assert plot is not None and "2 of 3 pairs can be told apart; best: tova, h2o" in plot.says
    (axes,) = plot.figure.axes
    texts = {text.get_text(): text.get_weight() for text in axes.texts}
    assert len(axes.texts) == 6 and sorted(texts.values()).count("normal") == 2
    assert axes.get_title() == "budget 256, 32 windows"
