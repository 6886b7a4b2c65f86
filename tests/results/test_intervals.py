"""Wilson's interval is defined once, for measures and report."""

from __future__ import annotations

import pytest
from scipy import stats

from kvbench.measures import statistics
from kvbench.results.intervals import wilson


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (0, 12), (3, 12), (12, 12), (500, 1000)])
def test_wilson_is_that_of_scipy(hits: int, n: int) -> None:
    expected = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_measures_use_the_same_function() -> None:
    assert statistics.wilson is wilson
