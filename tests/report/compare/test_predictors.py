"""Rank correlations of errors with the KL of the predictions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from kvbench.report.compare.comparison import Line, lines_of
from kvbench.report.compare.predictors import FEWEST_METHODS, predictors, settings_of, spearman
from kvbench.report.tables.error_predictors import error_predictors_table
from kvbench.results.row import Row


def lines(methods: int, context: int = 1024, seed: int = 0) -> list[Line]:
    """Methods whose output error orders them as their KL does, whose cosine does so backwards, and whose key error is
    noise; and the full cache."""
    draw = random.Random(seed)
    rows = [row("full", metric, 0.0, context) for metric in ("kl", "output_error", "key_cosine", "key_error")]
    for i in range(methods):
        for metric, value in (
            ("kl", math.exp(i)),
            ("output_error", 0.1 * i + 0.01),
            ("key_cosine", 1 - 0.01 * i),
            ("key_error", draw.random()),
        ):
            rows.append(row(f"m{i}", metric, value, context))
    return lines_of(rows, "error")


def row(method: str, metric: str, value: float, context: int) -> Row:
    return Row(
        method=method,
        store="dense",
        measure="error",
        metric=metric,
        value=value,
        context=context,
        model="m",
        status="ok",
    )


def test_spearman_is_scipys() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        first, second = draw.integers(0, 6, 12).astype(float), draw.normal(size=12)
        assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert spearman(np.zeros(5), np.arange(5.0)) == 0


def test_the_error_that_orders_the_methods_comes_first() -> None:
    found = predictors(lines(10))
    assert [one.metric for one in found] == ["key_cosine", "output_error", "key_error"] or [
        one.metric for one in found
    ] == ["output_error", "key_cosine", "key_error"]
    by_name = {one.metric: one for one in found}
    assert by_name["output_error"].spearman == pytest.approx(1)
    assert by_name["key_cosine"].spearman == pytest.approx(-1)
    assert 0.5 < by_name["output_error"].low < 0.99  # ten methods in perfect order are no proof
    noise = by_name["key_error"]
    assert noise.low < noise.spearman < noise.high and noise.n == 10  # the full cache is no method


def test_intervals_hold_the_true_correlation() -> None:
    """Bonett and Wright: about 95 of 100 intervals over 15 methods hold the population's rank correlation."""
    draw = np.random.default_rng(1)
    true = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's of a normal pair with a correlation of 0.6
    inside = 0
    for _ in range(300):
        pairs = draw.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 15)
        rows = [
            each
            for i, (a, b) in enumerate(pairs)
            for each in (row(f"m{i}", "output_error", a, 64), row(f"m{i}", "kl", math.exp(b), 64))
        ]
        (found,) = predictors(lines_of(rows, "error"))
        inside += found.low <= true <= found.high
    assert inside / 300 > 0.90


def test_too_few_methods_give_no_correlation_and_no_table() -> None:
    assert predictors(lines(FEWEST_METHODS - 1)) == []
    assert error_predictors_table(lines(FEWEST_METHODS - 1)) is None


def test_contexts_are_not_mixed() -> None:
    both = [*lines(8, 512), *lines(8, 1024)]
    assert [len(group) for group in settings_of(both)] == [9, 9]
    table = error_predictors_table(both)
    assert table is not None and len(table.records) == 6
    assert {column.key for column in table.columns} == {"context", "error", "spearman", "methods"}
    assert all(record["methods"] == 8 for record in table.records)
    cells = next(column for column in table.columns if column.key == "spearman").full
    assert cells[0].startswith(("+1.00 [", "−1.00 ["))
