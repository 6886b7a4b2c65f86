"""Bootstrap intervals over independent units, never over single tokens.

Tokens of one window depend on each other, so an interval over tokens is too narrow. The resampled unit is the window.
With fewer than 10 windows it is a block of consecutive scored tokens; such an interval does not generalise to other
text, and the row's note says so. Differences to the full cache are paired: the same unit of both is drawn together.
Every draw is seeded and units are sorted before it, so the order of measurement changes no bit.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.results.intervals import wilson as wilson

Array = NDArray[np.float64]
Interval = tuple[float, float]

LEVEL = 0.95
RESAMPLES = 2_000
ENOUGH_WINDOWS = 10
"""With fewer, blocks of tokens are drawn instead of windows."""
BLOCK = 16
"""Scored tokens of a block, at most."""
FEWEST_UNITS = 8
"""Blocks are shortened until there are as many."""
WORSE = 1e-4
"""Nats by which a unit must lie above the full cache's to count as worse: rounding alone moves it by less."""


@dataclass(frozen=True)
class Units:
    """The resampled units: a sum and a count for each, so that units are weighted by their number of tokens.

    length: tokens of a unit, the last of a window may be shorter. of_windows: whether a unit is a whole window.
    """

    sums: Array
    counts: Array
    length: int
    of_windows: bool

    @property
    def means(self) -> Array:
        return self.sums / self.counts

    @property
    def mean(self) -> float:
        """Over all tokens, rounded once: the same whatever the order."""
        return math.fsum(self.sums) / math.fsum(self.counts)

    @property
    def text(self) -> str:
        """For a note: which units were drawn, and that an interval over blocks does not generalise."""
        if self.of_windows:
            return f"95%: bootstrap over {len(self.sums)} windows"
        drawn = f"{len(self.sums)} blocks of {self.length} scored tokens"
        return f"95%: bootstrap over {drawn}; covers these windows only: use {ENOUGH_WINDOWS} or more to generalise"


def units_of(values: Array) -> Units:
    """The units of values [W, T], T scored tokens in each of W windows."""
    windows, tokens = values.shape
    of_windows = windows >= ENOUGH_WINDOWS
    length = tokens if of_windows else max(1, min(BLOCK, tokens, windows * tokens // FEWEST_UNITS))
    pieces = [values[:, start : start + length] for start in range(0, tokens, length)]
    # Window by window, so that units keep the order of the text.
    sums = np.stack([piece.sum(1) for piece in pieces], axis=1).ravel()
    counts = np.tile([float(piece.shape[1]) for piece in pieces], windows)
    return Units(sums, counts, length, of_windows)


def mean_interval(units: Units, seed: int) -> Interval | None:
    """95% interval of the mean over all tokens. None for fewer than two units."""
    return _bootstrap((units.sums, units.counts), _ratio, seed, "BCa")


def bounded_interval(units: Units, lowest: float, highest: float, seed: int) -> Interval:
    """As `mean_interval`, of values between `lowest` and `highest`.

    Where all units came out alike there is nothing to draw, and no certainty either: Wilson's bound tells what share of
    further ones may still differ, and they by as much as they can. For hits and misses that is Wilson's interval.
    """
    found = None if np.ptp(units.means) == 0 else mean_interval(units, seed)
    if found is not None:
        return found
    share = wilson(0, len(units.sums))[1]
    return units.mean - share * (units.mean - lowest), units.mean + share * (highest - units.mean)


def _ratio(sums: Array, counts: Array, axis: int = -1) -> Array:
    ratio: Array = sums.sum(axis) / counts.sum(axis)
    return ratio


def worst_decile(units: Units) -> float:
    """Mean of the largest tenth of the units' means, of one unit at least."""
    return float(_upper_tenth(units.means))


def worst_decile_interval(units: Units, seed: int) -> Interval | None:
    """95% interval of `worst_decile`."""
    return _bootstrap((units.means,), _upper_tenth, seed, "percentile")


def _upper_tenth(values: Array, axis: int = -1) -> Array:
    count = math.ceil(values.shape[axis] / 10)
    ordered = np.sort(np.moveaxis(values, axis, -1), axis=-1)
    mean: Array = ordered[..., -count:].mean(-1)  # sorted: the same whatever the order
    return mean


def worse(units: Units) -> tuple[int, int]:
    """Of differences to the full cache: units that lie more than `WORSE` above it, and units in all."""
    return int((units.means > WORSE).sum()), len(units.sums)


def percentile_interval(values: Sequence[float] | Array, percent: float, seed: int) -> Interval | None:
    """95% interval of a percentile (50: the median). None for fewer than two values."""

    def percentile(sample: Array, axis: int = -1) -> Array:
        return np.asarray(np.percentile(sample, percent, axis=axis))

    return _bootstrap((np.asarray(values, dtype=np.float64),), percentile, seed, "percentile")


def median_interval(values: Sequence[float] | Array, seed: int) -> Interval | None:
    """95% interval of the median. None for fewer than two values."""
    return percentile_interval(values, 50, seed)


def median_ratio_interval(values: Array, references: Array, seed: int) -> Interval | None:
    """95% interval of median(values) / median(references) [N] each; pairs are drawn together. None below two pairs."""

    def ratio(sample: Array, reference: Array, axis: int = -1) -> Array:
        found: Array = np.median(sample, axis=axis) / np.median(reference, axis=axis)
        return found

    return _bootstrap((values, references), ratio, seed, "percentile")


def _bootstrap(samples: tuple[Array, ...], statistic: Callable[..., Array], seed: int, method: str) -> Interval | None:
    """BCa where the statistic is smooth (B. Efron, 1987, JASA 82), percentiles else; samples are drawn together."""
    if len(samples[0]) < 2:
        return None
    order = np.lexsort(samples)
    samples = tuple(sample[order] for sample in samples)
    value = float(statistic(*samples))
    if not math.isfinite(value):
        return None
    if all(np.ptp(sample) == 0 for sample in samples):
        return value, value
    from scipy import stats  # seconds, and address space: only where something is drawn

    # Where every draw comes out the same, BCa is undefined and percentiles serve.
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = _interval(samples, statistic, seed, method)
        if not all(map(math.isfinite, found)):
            found = _interval(samples, statistic, seed, "percentile")
    return found


def _interval(samples: tuple[Array, ...], statistic: Callable[..., Array], seed: int, method: str) -> Interval:
    from scipy import stats

    found = stats.bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=250,
        confidence_level=LEVEL,
        method=method,
        random_state=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def bounds(interval: Interval | None, scale: Callable[[float], float] = float) -> dict[str, Any]:
    """An interval as the columns `low` and `high` of a row, on the scale of the row; nothing where there is none."""
    return {} if interval is None else {"low": scale(interval[0]), "high": scale(interval[1])}
