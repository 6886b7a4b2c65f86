"""Intervals: against loops over draws, against known distributions, and indifferent to the order of what was drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.measures.statistics import (
    BLOCK,
    RESAMPLES,
    bounded_interval,
    bounds,
    mean_interval,
    median_interval,
    percentile_interval,
    units_of,
    wilson,
    worse,
    worst_decile,
    worst_decile_interval,
)

DRAW = np.random.default_rng(0)


def by_hand(means: np.ndarray, counts: np.ndarray, draws: int = 20_000) -> tuple[float, float]:
    """Percentile bootstrap of a weighted mean, one draw after another."""
    chance = np.random.default_rng(1)
    found = []
    for _ in range(draws):
        picked = chance.integers(0, len(means), len(means))
        found.append((means[picked] * counts[picked]).sum() / counts[picked].sum())
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize(
    ("windows", "tokens", "units", "length"),
    [
        (12, 20, 12, 20),
        (10, 1, 10, 1),
        (2, 128, 16, 16),
        (9, 30, 18, 16),
        (1, 128, 8, 16),
        (1, 40, 8, 5),
        (3, 10, 12, 3),
        (1, 3, 3, 1),
        (1, 1, 1, 1),
        (1, 20_000, 1_250, 16),
    ],
)
def test_what_is_drawn(windows: int, tokens: int, units: int, length: int) -> None:
    values = DRAW.normal(size=(windows, tokens))
    found = units_of(values)
    assert (len(found.sums), found.length, found.of_windows) == (units, length, windows >= 10)
    assert found.length <= BLOCK or found.of_windows
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.counts.sum() == windows * tokens
    # No unit reaches from one window into the next.
    by_window = found.sums.reshape(windows, -1).sum(1)
    assert by_window == pytest.approx(values.sum(1))


@pytest.mark.parametrize("shape", [(30, 8), (2, 128), (3, 50)])
def test_the_mean_against_a_loop_of_draws(shape: tuple[int, int]) -> None:
    units = units_of(DRAW.normal(1.0, 0.5, size=shape))
    low, high = by_hand(units.means, units.counts)
    found = mean_interval(units, seed=0)
    assert found == pytest.approx((low, high), abs=0.15 * (high - low))


def test_tokens_of_a_window_are_not_taken_as_independent() -> None:
    """Windows that differ and tokens inside them that do not: over tokens the interval would be far too narrow."""
    values = np.repeat(DRAW.normal(size=(20, 1)), 128, axis=1)
    low, high = mean_interval(units_of(values), seed=0) or (0, 0)
    naive = 2 * 1.96 * values.std() / math.sqrt(values.size)
    assert high - low > 8 * naive


def test_coverage() -> None:
    """The true mean lies inside about 19 times of 20; few units make it a little less."""
    inside = 0
    for i in range(200):
        chance = np.random.default_rng(i)
        values = 2 + chance.normal(size=(16, 1)) + 0.1 * chance.normal(size=(16, 20))
        low, high = mean_interval(units_of(values), seed=0) or (0, 0)
        inside += low <= 2 <= high
    assert 174 <= inside <= 198


def test_alike_scores_are_no_certainty() -> None:
    """Four hits of four are not a hit rate of 100% +- 0, and four equal pairs no proof of equality."""
    for n in (1, 4, 12, 40):
        hits, ties = units_of(np.ones((n, 1))), units_of(np.zeros((n, 1)))
        assert bounded_interval(hits, 0, 1, 0) == pytest.approx(wilson(n, n))
        assert bounded_interval(ties, 0, 1, 0) == pytest.approx(wilson(0, n))
        low, high = bounded_interval(ties, -1, 1, 0)
        assert -low == high == pytest.approx(wilson(0, n)[1])
    mixed = units_of(DRAW.uniform(size=(12, 1)))
    assert bounded_interval(mixed, 0, 1, 3) == mean_interval(mixed, 3)


@pytest.mark.parametrize("n", [4, 12])
def test_coverage_of_paired_hits(n: int) -> None:
    """Four of a quarter are alike often enough to matter: without a bound of their own 6 of 10 would cover."""
    inside = 0
    for i in range(200):
        lost = np.random.default_rng(i).choice([-1.0, 0.0, 0.0, 0.0], size=n)
        low, high = bounded_interval(units_of(lost[:, None]), -1, 1, 0)
        inside += low <= -0.25 <= high
    assert inside >= 174


def test_order_changes_no_bit() -> None:
    values = DRAW.normal(size=(14, 33))
    turned = values[DRAW.permutation(14)]
    for interval in (mean_interval, worst_decile_interval):
        assert interval(units_of(values), 3) == interval(units_of(turned), 3)
    assert units_of(values).mean == units_of(turned).mean
    assert worst_decile(units_of(values)) == worst_decile(units_of(turned))
    flat = values.ravel()
    assert median_interval(flat, 3) == median_interval(flat[DRAW.permutation(len(flat))], 3)


def test_a_seed_is_a_draw() -> None:
    units = units_of(DRAW.normal(size=(12, 5)))
    assert mean_interval(units, 1) == mean_interval(units, 1) != mean_interval(units, 2)


def test_percentiles_against_a_loop_of_draws() -> None:
    values = DRAW.gamma(2.0, size=60)
    for percent in (50, 90):
        chance = np.random.default_rng(1)
        drawn = [np.percentile(values[chance.integers(0, 60, 60)], percent) for _ in range(4_000)]
        low, high = np.percentile(drawn, [2.5, 97.5])
        assert percentile_interval(values, percent, 0) == pytest.approx((low, high), abs=0.2 * (high - low))
    assert RESAMPLES >= 1_000


def test_worst_decile_and_worse_by_hand() -> None:
    means = np.arange(25.0)[DRAW.permutation(25)] - 20
    units = units_of(np.repeat(means[:, None], 3, axis=1))
    assert worst_decile(units) == np.mean([2, 3, 4])  # a tenth of 25, rounded up
    assert worse(units) == (4, 25)  # 1 .. 4: none of 0, none of 0.00001
    assert worse(units_of(np.full((12, 2), 1e-5))) == (0, 12)


def test_where_there_is_nothing_to_draw() -> None:
    assert mean_interval(units_of(np.ones((1, 1))), 0) is None
    assert mean_interval(units_of(np.full((2, 20), 3.0)), 0) == (3, 3)
    assert mean_interval(units_of(np.full((2, 20), math.inf)), 0) is None
    assert bounds(None) == {}
    assert bounds((1.0, 2.0), math.exp) == {"low": math.e, "high": math.exp(2)}
