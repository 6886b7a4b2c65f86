"""How much of the gap between a floor (random eviction) and a ceiling (hindsight) a keep rule closes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from kvbench.errors import UserError
from kvbench.results.paired import FEWEST_UNITS, LEVEL, Array, interval

RESAMPLES = 2_000


@dataclass(frozen=True)
class GapClosed:
    """Share of the gap from floor to ceiling that a rule closes: 0 at the floor, 1 at the ceiling, not bounded.

    value: None where undefined; `undefined` then says why. low, high: 95% interval, None with fewer than 10 units.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    undefined: str | None = None


def gap_closed(floor: ArrayLike, rule: ArrayLike, ceiling: ArrayLike, seed: int = 0) -> GapClosed:
    """(floor - rule) / (floor - ceiling) of the means, from losses [W] on the same units in the same order.

    Losses are NLL or KL in nats, lower is better. Undefined where the paired 95% interval of floor - ceiling is not
    wholly above 0: a share of a gap that may be 0 means nothing.

    The interval draws units with replacement, floor, rule and ceiling of a unit together: BCa (B. Efron, 1987, JASA
    82) at the level that allows for few units (T. Hesterberg, 2015, Am. Stat. 69, 371-386). Plain BCa misses 9.9% with
    10 normal units, this 6.0% (exponential: 14% and 9%); with 32 units 5.5% (8%), with 128 units 4.6% (5%).
    """
    losses = [np.asarray(each, dtype=np.float64) for each in (floor, rule, ceiling)]
    shapes = [list(each.shape) for each in losses]
    if losses[0].ndim != 1 or any(shape != shapes[0] for shape in shapes):
        raise UserError(f"floor, rule and ceiling have shapes {shapes}: give losses on the same units, [W] each")
    n = len(losses[0])
    if not all(np.isfinite(each).all() for each in losses):
        return GapClosed(None, None, None, n, f"some of the {n} units have no finite value")
    closed, gap = losses[0] - losses[1], losses[0] - losses[2]
    bounds = interval(gap)
    if bounds is None:
        return GapClosed(None, None, None, n, f"{n} unit{'' if n == 1 else 's'}: 2 or more are needed")
    if bounds[1] < 0:
        return GapClosed(None, None, None, n, f"the ceiling is worse than the floor ({n} units)")
    if not bounds[0] > 0:
        return GapClosed(None, None, None, n, f"floor and ceiling cannot be told apart ({n} units)")
    order = np.lexsort((closed, gap))  # the order of the units changes no bit
    closed, gap = closed[order], gap[order]
    value = math.fsum(closed) / math.fsum(gap)
    if n < FEWEST_UNITS:
        return GapClosed(value, None, None, n)
    low, high = _ratio_interval(closed, gap, seed)
    return GapClosed(value, low, high, n)


def _ratio_interval(above: Array, below: Array, seed: int) -> tuple[float, float]:
    """95% BCa interval of sum(above) / sum(below) over units [W]."""
    from scipy import special

    n = len(above)
    value = above.sum() / below.sum()
    sums = _draws(n, seed) @ np.stack([above, below], axis=1)
    ratios = sums[:, 0] / sums[:, 1]
    share = ((ratios < value).mean() + (ratios <= value).mean()) / 2
    bias = special.ndtri(np.clip(share, 1 / RESAMPLES, 1 - 1 / RESAMPLES))
    without_one = (above.sum() - above) / (below.sum() - below)
    influence = without_one.mean() - without_one
    scale = (influence**2).sum() ** 1.5
    acceleration = (influence**3).sum() / (6 * scale) if scale > 0 else 0.0
    wide = math.sqrt(n / (n - 1)) * float(special.stdtrit(n - 1, (1 + LEVEL) / 2))
    ends = bias + np.array([-wide, wide])
    low, high = np.quantile(ratios, special.ndtr(bias + ends / (1 - acceleration * ends)))
    return float(low), float(high)


@lru_cache(maxsize=16)
def _draws(n: int, seed: int) -> Array:
    """How often each of n units is drawn in each resample, [RESAMPLES, n]."""
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return counts.astype(np.float64)
