"""Which rows may be compared, which is the baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.compare.comparison import (
    COMPARED,
    MODEL_AND_DEVICE,
    Line,
    baseline_of,
    comparison_key,
    lines_of,
    measures_of,
    weights_of,
)
from kvbench.results.row import Row
from tests.shared.rows import BASE, rows


def test_baseline_is_looked_for_in_the_same_setting() -> None:
    made = rows(measures=["perplexity"]) + rows(measures=["perplexity"], base=replace(BASE, dtype="bfloat16"))
    lines = lines_of(made, "perplexity")
    for line in lines:
        base = baseline_of(line, lines)
        assert base is not None and base.baseline and base.row.dtype == line.row.dtype
    assert baseline_of(lines[1], [line for line in lines if not line.baseline]) is None


OTHER_VALUES = {"kv_heads": 9, "converted": True, "batch": 4}


@pytest.mark.parametrize("column", COMPARED)
def test_rows_that_differ_in_a_compared_column_are_not_compared(column: str) -> None:
    full, h2o = replace(BASE, method="full"), replace(BASE, method="h2o", budget=64)
    assert comparison_key(full) == comparison_key(h2o)
    other = replace(h2o, **{column: OTHER_VALUES.get(column, "other")})
    assert comparison_key(other) != comparison_key(h2o)
    same = comparison_key(other, across_measures=True) == comparison_key(h2o, across_measures=True)
    assert same == (column not in MODEL_AND_DEVICE)
    lines = [Line(replace(full, context=512)), Line(replace(other, context=512))]
    assert baseline_of(lines[1], lines) is None


def test_layouts_of_latent_attention_are_not_compared() -> None:
    expand, absorbed = (replace(BASE, knobs=f'{{"mla": "{layout}"}}') for layout in ("expand", "absorbed"))
    assert comparison_key(expand) != comparison_key(absorbed)


def test_of_several_baselines_the_one_with_most_settings_in_common_is_taken() -> None:
    full = [Line(replace(BASE, method="full", kernel=kernel)) for kernel in ("reference", "triton")]
    line = Line(replace(BASE, method="h2o", kernel="triton"))
    assert baseline_of(line, [*full, line]) is full[1]


def test_a_row_without_weights_counts_as_trained_unless_it_was_converted() -> None:
    assert weights_of(BASE) == "trained" and weights_of(replace(BASE, converted=True)) == "pooled"
    assert weights_of(replace(BASE, weights="random")) == "random"
    assert weights_of(replace(BASE, note="random weights")) == "trained"


def test_measures_stand_in_reading_order_and_unknown_ones_behind() -> None:
    made = [Row(measure=name) for name in ("entropy", "memory", "perplexity")]
    assert measures_of(made, ("perplexity", "memory")) == ["perplexity", "memory", "entropy"]
