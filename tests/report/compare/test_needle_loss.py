"""Loss of needles against the full cache, on the same needles."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvbench.measures.question_rows import above_full
from kvbench.report.compare.needle_hits import Hits
from kvbench.report.compare.needle_loss import NeedleLoss, paired_loss, unpaired_loss
from kvbench.results.intervals import wilson
from kvbench.results.row import Row
from tests.shared.rows import BASE

RATE = replace(BASE, measure="needle", metric="hit_rate", context=1024)


def measured(own: list[int], full: list[int]) -> tuple[Row, Row]:
    """The rows that `needle` writes from hits and misses on the same prompts."""
    low, high = wilson(sum(own), len(own))
    rate = replace(RATE, value=sum(own) / len(own), n=len(own), low=low, high=high)
    return rate, above_full(replace(rate, metric="hit_rate_minus_full"), own, full, seed=0)


@pytest.mark.parametrize(
    ("misses", "n", "state"),
    [
        (0, 12, "unknown"),
        (0, 35, "within"),
        (0, 34, "unknown"),
        (1, 60, "within"),
        (30, 60, "worse"),
        (3, 60, "unknown"),
    ],
)
def test_a_loss_is_within_the_margin_worse_or_unknown(misses: int, n: int, state: str) -> None:
    rate, difference = measured([0] * misses + [1] * (n - misses), [1] * n)
    found = paired_loss([rate], [difference])
    assert found is not None and found.loss == pytest.approx(misses / n)
    assert (found.within, found.worse) == (state == "within", state == "worse")
    assert str(found) == f"{n - misses}/{n} needles (full cache {n}/{n})"


def test_needles_that_both_miss_are_no_loss() -> None:
    hits = [1] * 60 + [0] * 40
    found = paired_loss(*([row] for row in measured(hits, hits)))
    assert found is not None and found.loss == 0 and found.full.rate == 0.6 and not found.worse
    assert not found.within and found.needed == 181  # as if the two shares were independent
    more = paired_loss(*([row] for row in measured(hits * 2, hits * 2)))
    assert more is not None and more.within


def test_needed_is_where_the_margin_can_be_shown() -> None:
    rate, difference = measured([1] * 12, [1] * 12)
    found = paired_loss([rate], [difference])
    assert found is not None and found.needed == 35
    lost = unpaired_loss(replace(rate, value=0.5, low=0.3, high=0.7), rate)
    assert lost is not None and lost.needed is None


def test_tasks_are_pooled_by_their_needles() -> None:
    one, two = measured([1] * 30, [1] * 30), measured([1] * 20 + [0] * 10, [1] * 30)
    pooled = paired_loss([one[0], two[0]], [one[1], two[1]])
    assert pooled is not None and (pooled.own.hits, pooled.own.n) == (50, 60) and pooled.loss == pytest.approx(1 / 6)
    assert paired_loss([one[0]], []) is None and paired_loss([], []) is None
    assert paired_loss([one[0]], [replace(one[1], value=None)]) is None


def test_the_interval_covers_the_truth_for_hits_on_the_same_needles() -> None:
    """A true loss of 9 points where both caches are asked the same: the interval misses it for 5% at most."""
    pick, missed, draws = random.Random(0), 0, 2_000
    for _ in range(draws):
        full = [pick.random() < 0.9 for _ in range(60)]
        own = [hit and pick.random() < 0.9 for hit in full]
        low, high = NeedleLoss(Hits(sum(own), 60), Hits(sum(full), 60)).bounds
        missed += not low <= 0.09 <= high
    assert missed / draws < 0.05


def test_without_differences_two_rates_over_as_many_needles_serve() -> None:
    rate, _ = measured([1] * 60, [1] * 60)
    worse = unpaired_loss(replace(rate, value=0.5), rate)
    assert worse is not None and worse.worse
    equal = unpaired_loss(rate, rate)
    assert equal is not None and equal.within
    assert unpaired_loss(replace(rate, n=59), rate) is None and unpaired_loss(replace(rate, value=None), rate) is None
