"""Needles that a method does not find and the full cache finds, of the same needles, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.report.compare.needle_hits import Hits
from kvbench.results.intervals import wilson
from kvbench.results.row import Row

HIT_RATE = "hit_rate"
BEYOND_RECENT = "hit_rate_beyond_recent"
"""Of the needles that lay before the newest tokens, which every recency rule keeps."""
MARGIN = 0.1
"""Share of the needles: the largest loss that counts as tolerable."""
RateKey = tuple[str | None, int | None, str | None]
"""Metric, length, task."""
FEWEST_NEEDLES = 10
"""With fewer needles no loss is judged."""


@dataclass(frozen=True)
class NeedleLoss:
    """What a method and the full cache found of the same needles. beyond: those before the newest tokens only."""

    own: Hits
    full: Hits
    beyond: bool = False

    @property
    def loss(self) -> float:
        """Share of the needles that only the full cache finds, less those that only the method finds."""
        return self.full.rate - self.own.rate

    @property
    def bounds(self) -> tuple[float, float]:
        """95% interval of the loss: `difference_bounds`."""
        return difference_bounds(self.full.rate, self.own.rate, self.own.n)

    @property
    def within(self) -> bool:
        """The needles show that the loss stays below MARGIN."""
        return self.own.n >= FEWEST_NEEDLES and self.bounds[1] < MARGIN

    @property
    def worse(self) -> bool:
        """The needles show a loss, and it may exceed MARGIN."""
        return self.own.n >= FEWEST_NEEDLES and self.bounds[0] > 0 and not self.within

    @property
    def needed(self) -> int | None:
        """Needles at which `within` is likely if both rates stay; None where the loss itself reaches the margin."""
        if self.loss >= MARGIN:
            return None
        counts = range(FEWEST_NEEDLES, 10_000)
        return next((n for n in counts if difference_bounds(self.full.rate, self.own.rate, n)[1] < MARGIN), None)

    def __str__(self) -> str:
        return f"{self.own} needles (full cache {self.full})"


def difference_bounds(one: float, other: float, n: int) -> tuple[float, float]:
    """95% interval of the difference of two shares of n, from their Wilson intervals.

    R. G. Newcombe, 1998, Statist. Med. 17, 873-890, method 10, for independent shares. Hits of two caches on the same
    needles agree more often than independent ones, so the interval is too wide rather than too narrow.
    """
    (low, high), (other_low, other_high) = wilson(one * n, n), wilson(other * n, n)
    below = math.hypot(one - low, other_high - other)
    above = math.hypot(high - one, other - other_low)
    return one - other - below, one - other + above


def needle_loss(rates: Mapping[RateKey, Row], places: Sequence[tuple[int, str | None]]) -> NeedleLoss | None:
    """Of the needles that lay before the newest tokens, over the tasks that tell them apart; else of all needles.

    places: length and task. None without differences to the full cache.
    """
    for metric in (BEYOND_RECENT, HIT_RATE):
        known = [place for place in places if (metric, *place) in rates and (f"{metric}_minus_full", *place) in rates]
        if metric == BEYOND_RECENT or len(known) == len(places):
            own, above = ([rates[name, *place] for place in known] for name in (metric, f"{metric}_minus_full"))
            if (loss := paired_loss(own, above)) is not None:
                return loss
    return None


def paired_loss(rates: Sequence[Row], differences: Sequence[Row]) -> NeedleLoss | None:
    """From hit rates of tasks and their differences to the full cache on the same needles; None if one is missing."""
    known = [row.value is not None and bool(row.n) for row in (*rates, *differences)]
    if len(rates) != len(differences) or not rates or not all(known):
        return None
    counts = [(row.n or 0, row.value or 0.0) for row in rates]
    above = [(row.n or 0) * (row.value or 0.0) for row in differences]
    n, hits = sum(count for count, _ in counts), math.fsum(count * rate for count, rate in counts)
    full = min(float(n), max(0.0, hits - math.fsum(above)))
    return NeedleLoss(Hits(hits, n), Hits(round(full, 6), n), rates[0].metric == BEYOND_RECENT)


def unpaired_loss(own: Row, full: Row) -> NeedleLoss | None:
    """From two hit rates over as many needles; None where their numbers differ or one is missing."""
    if own.value is None or full.value is None or not own.n or own.n != full.n:
        return None
    return NeedleLoss(Hits(own.value * own.n, own.n), Hits(full.value * full.n, full.n))
