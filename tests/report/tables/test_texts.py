"""Rows over all texts of a run, rows of one text, and the share of the gap that a rule closes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.texts import is_code, split_by_text, texts_of
from kvbench.report.compare.warnings import find_warnings, remarks
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview
from kvbench.results.row import Row, with_flags
from tests.report.synthetic import FULL, OTHER, cache, column, keys
from tests.shared.rows import BASE

UNDEFINED = "floor and ceiling cannot be told apart (8 windows)"


def over_texts() -> list[Row]:
    """Two methods over three texts, in one run, the rows of each text after those of all."""
    made = []
    for own in (FULL, cache("full", 10, 0.001, **OTHER)):
        scored = [replace(row, run="one") for row in own if row.measure == "perplexity"]
        made += [replace(row, dataset="essays+bible+code") for row in scored]
        for text, loss in (("essays", 0.01), ("bible", 0.02), ("code", 0.3)):
            single = [row for row in scored if row.metric in ("nll_minus_full", "kl")]
            made += [replace(row, dataset=text, value=loss * (row.store == "int4")) for row in single]
        made += [replace(row, run="one") for row in own if row.measure != "perplexity"]
    return made


def test_names_of_data_sets() -> None:
    assert texts_of("essays+code") == ("essays", "code") and texts_of(None) == () and texts_of("essays") == ("essays",)
    assert is_code("Code") and not is_code("essays")


def test_rows_of_one_text_are_told_from_those_over_all() -> None:
    pooled, single = split_by_text(over_texts())
    assert {row.dataset for row in pooled if row.measure == "perplexity"} == {"essays+bible+code"}
    assert {row.dataset for row in single} == {"essays", "bible", "code"}
    assert all(row.measure == "perplexity" for row in single)  # needles lie in the first text
    alone = [replace(row, dataset="code", run="two") for row in FULL]
    assert split_by_text([*over_texts(), *alone])[1] == single  # a run over one text is a pooled one of its own


def test_no_table_mixes_them() -> None:
    tables = {table.name: table for table in build_tables(over_texts())}
    assert column(tables["perplexity"], "nll_minus_full")[1].startswith("+0.00")
    assert tables["perplexity"].height == 2 and not tables["perplexity_by_text"].terminal
    assert column(tables["perplexity_by_text"], "dataset") == ["essays", "essays", "bible", "bible", "code", "code"]
    assert column(tables["perplexity_by_text"], "nll_minus_full")[-1].startswith("+0.300")
    assert set(keys(tables["perplexity_by_text"])) <= {"method", "dataset", "ppl", "nll_minus_full", "kl", "verdict"}
    (group,) = groups_of(over_texts())
    (member,) = group.members
    assert group.dataset == "essays+bible+code" and member.value("nll_minus_full") == 0.001
    assert member.by_text["code"]["nll_minus_full"].value == 0.3
    head = overview([group])
    assert head is not None and column(head, "nll_minus_full")[1].startswith("+0.00")


def with_gaps(kl: float | None, nll: float | None) -> list[Row]:
    rule = cache("h2o", 5, 0.01, budget=64.0)
    start = replace(next(row for row in rule if row.metric == "kl"), unit="share", low=None, high=None)
    gaps = [
        replace(
            start,
            metric=metric,
            value=value,
            low=None if value is None else value - 0.1,
            high=None if value is None else value + 0.1,
            note=UNDEFINED if value is None else None,
        )
        for metric, value in (("gap_closed_kl", kl), ("gap_closed_nll", nll))
    ]
    return [*FULL, *rule, *gaps]


def test_gap_closed_is_a_column_in_percent_with_its_interval() -> None:
    rows = with_gaps(0.62, -0.05)
    head = overview(groups_of(rows))
    assert head is not None and column(head, "gap_closed_kl") == ["–", "62.0% [52.0%, 72.0%]"]
    assert next(one for one in head.columns if one.key == "gap_closed_kl").header == "gap closed"
    perplexity = next(table for table in build_tables(rows) if table.name == "perplexity")
    assert column(perplexity, "gap_closed_kl") == column(head, "gap_closed_kl")
    assert column(perplexity, "gap_closed_nll") == ["–", "-5.0% [-15.0%, 5.0%]"]
    assert head.records[1]["gap_closed_kl"] == 0.62 and head.records[1]["gap_closed_nll_low"] == pytest.approx(-0.15)


def test_an_undefined_gap_is_a_dash_and_its_reason_stands_under_how_it_was_measured() -> None:
    rows = with_gaps(0.62, None)
    perplexity = next(table for table in build_tables(rows) if table.name == "perplexity")
    assert column(perplexity, "gap_closed_nll") == ["–", "–"]
    assert not any(UNDEFINED in warning.text or "undefined" in warning.text for warning in find_warnings(rows))
    assert any(UNDEFINED in remark.text for remark in remarks(rows))


def test_methods_that_see_the_future_are_labelled_and_never_bold() -> None:
    rows = [*FULL, *cache("hindsight", 1, 0.0, budget=64.0), *cache("h2o", 4, 0.1, budget=64.0)]
    rows += [with_flags(row, "sees_future") for row in cache("mine", 2, 0.0, budget=64.0)]
    head = overview(groups_of(rows))
    assert head is not None
    names = ["full", "hindsight (sees the future)", "h2o", "mine (sees the future)"]
    assert column(head, "method") == names
    held = next(one for one in head.columns if one.key == "held_bytes")
    assert held.best == frozenset()  # one real method has none to beat
    more = [*rows, *cache("tova", 8, 0.1, budget=64.0)]
    head = overview(groups_of(more))
    assert head is not None and next(one for one in head.columns if one.key == "held_bytes").best == {2}


def test_a_better_score_over_blocks_of_few_windows_is_no_warning() -> None:
    start = replace(BASE, method="h2o", store="dense", budget=64.0, measure="perplexity", context=1024)
    below = replace(start, metric="nll_minus_full", value=-0.1, low=-0.2, high=-0.05)
    assert [one.kind for one in find_warnings([below])] == ["better than full"]
    few = with_flags(below, "few_windows", "better_than_full")
    assert [one.kind for one in find_warnings([few])] == []
