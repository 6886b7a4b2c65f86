"""Intervals and verdicts from paired differences to the full cache: one difference a window, document or prompt.

A difference is method minus full, in nats, on the same unit of text: above 0 the method is worse. Tokens of one window
depend on each other, so tokens are averaged to one value a window first (`window_means`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.errors import UserError

Array = NDArray[np.float64]
Kind = Literal["within_margin", "worse", "not_enough_data"]

LEVEL = 0.95
MARGIN = 0.01
"""Nats: the largest mean loss that counts as tolerable."""
FEWEST_UNITS = 10
"""With fewer units no verdict is given and no methods are compared."""
POWER = 0.8
"""Probability of a verdict at `Verdict.needed` units, if mean and spread stay as observed."""


def window_means(values: ArrayLike) -> Array:
    """Mean of each window [W] from values of tokens [W, T]. The tokens of a window are not independent."""
    tokens = np.asarray(values, dtype=np.float64)
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise UserError(f"values of tokens have shape {list(tokens.shape)}: give [windows, tokens] with tokens >= 1")
    means: Array = tokens.mean(axis=1)
    return means


def unit_means(values: ArrayLike, labels: Sequence[Hashable]) -> tuple[tuple[Hashable, ...], Array]:
    """Labels in order of first appearance, and the mean of the values [N] that carry each label.

    Use for documents that give several windows: windows of one document are not independent. Every document then counts
    once, however many windows it gives, so the mean over documents can differ from the mean over windows.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (len(labels),):
        raise UserError(f"{len(labels)} labels for values of shape {list(found.shape)}: give one label for each value")
    places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    index = np.array([places[label] for label in labels], dtype=np.intp)
    counts = np.bincount(index, minlength=len(places))
    return tuple(places), np.bincount(index, weights=found, minlength=len(places)) / counts


def moments(differences: Array) -> tuple[Array, Array, Array]:
    """Mean, standard error, and skewness over sqrt(W), each [...], of differences [..., W] with W >= 2.

    Units are sorted first, so that their order changes no bit. Skewness is 0 where undefined: W = 2, or equal units.
    """
    ordered = np.sort(differences, axis=-1)
    n = ordered.shape[-1]
    mean = ordered.mean(axis=-1)
    deviations = ordered - mean[..., None]
    variance = (deviations**2).sum(axis=-1) / (n - 1)
    third = (deviations**3).mean(axis=-1) * n * n / ((n - 1) * max(n - 2, 1))
    defined = (variance > 0) & (n > 2)
    skew = np.divide(third, variance**1.5, out=np.zeros_like(third), where=defined)
    return mean, np.sqrt(variance / n), skew / math.sqrt(n)


def intervals(differences: Array) -> tuple[Array, Array, Array]:
    """Mean, low and high, each [...], of differences [..., W]: as `interval`. NaN where W < 2 or a unit is NaN."""
    from scipy import special

    n = differences.shape[-1]
    if n < 2:
        undefined = np.full(differences.shape[:-1], np.nan)
        return (differences[..., 0] if n else undefined), undefined, undefined
    mean, error, skew = moments(differences)
    t = float(special.stdtrit(n - 1, (1 + LEVEL) / 2))
    below = np.maximum(t, _without_skew(t, skew))
    above = np.maximum(t, -_without_skew(-t, skew))
    return mean, mean - error * below, mean + error * above


def interval(differences: ArrayLike) -> tuple[float, float] | None:
    """95% interval of the mean of the differences [W]; None for fewer than two units, NaN where one is not finite.

    A t interval. Each end moves outward where Hall's correction for skewness (P. Hall, 1992, JRSS B 54, 221-228) puts
    the end further out. Neither plain t nor BCa keeps 95% on skewed differences (a few windows with a large loss), and
    BCa fails on few windows even without skew. Misses in percent (5 is nominal), 4,000 draws each, as t / BCa / this:

    | windows     |                8 |               10 |               32 |              128 |
    | normal      |  4.8 / 10.7 / 3.6 |  5.2 / 10.3 / 4.1 |  5.0 /  7.1 / 4.7 |  4.4 /  4.8 / 4.3 |
    | Student t3  |  3.7 / 14.9 / 3.1 |  4.2 / 14.2 / 3.7 |  3.7 /  8.9 / 3.6 |  4.6 /  7.0 / 4.4 |
    | gamma(2)    |  7.8 / 12.9 / 4.6 |  8.0 / 11.6 / 4.7 |  5.9 /  6.5 / 3.8 |  5.5 /  5.6 / 4.3 |
    | exponential | 10.4 / 14.0 / 5.3 |  9.5 / 11.4 / 4.5 |  7.2 /  7.2 / 4.2 |  6.3 /  6.3 / 4.5 |
    | lognormal   | 17.6 / 20.5 / 9.0 | 16.2 / 17.1 / 7.6 | 11.7 / 10.5 / 5.9 |  8.0 /  7.7 / 4.6 |

    No interval covers collapses that the windows do not contain: where 8% of the windows lose 10 standard deviations,
    this misses 27% of the time with 10 windows, 19% with 32 and 5% with 128.
    """
    values = _units(differences)
    if len(values) < 2:
        return None
    _, low, high = intervals(values)
    return float(low), float(high)


def _without_skew(t: float, skew: Array) -> Array:
    """Hall's cubic transform inverted at t, for skewness over sqrt(W): equals t where the skewness is 0."""
    skewed = np.abs(skew) > 1e-6  # below, the formula loses digits and changes nothing
    divisor = np.where(skewed, skew, 1.0)
    return np.where(skewed, 3 / divisor * (np.cbrt(1 + divisor * (t - divisor / 6)) - 1), t)


@dataclass(frozen=True)
class Verdict:
    """What the differences of one method to the full cache show.

    kind: what is shown. mean, low, high: nats, the mean difference and its 95% interval. n: units. needed: units at
    which a verdict is likely (None where a verdict is given or a difference is not finite). margin: nats. unit: what
    text() calls a unit.
    """

    kind: Kind
    mean: float
    low: float
    high: float
    n: int
    needed: int | None
    margin: float = MARGIN
    unit: str = "window"

    @property
    def shows_loss(self) -> bool:
        """A verdict is given and the whole interval lies above 0. Can be true within the margin: a tolerable loss."""
        return self.kind != "not_enough_data" and self.low > 0

    def text(self) -> str:
        """The verdict for people, with its numbers."""
        units = f"{self.n} {self.unit}{'' if self.n == 1 else 's'}"
        numbers = f"({units}; 95% interval {self.low:+.3g} to {self.high:+.3g})"
        if self.kind == "worse":
            return f"worse by {self.mean:.2g} nats {numbers}"
        if self.kind == "within_margin":
            loss = f", with a loss of {self.mean:.2g} nats" if self.shows_loss else ""
            return f"within the margin of {self.margin:g} nats{loss} {numbers}"
        if self.needed is None:
            return f"no verdict ({units}, some without a finite difference)"
        likely = "at least" if self.needed == FEWEST_UNITS else "about"
        return f"not enough data ({units}; {likely} {rounded_up(self.needed)} needed)"


def verdict(differences: ArrayLike, margin: float = MARGIN, unit: str = "window") -> Verdict:
    """The verdict for one method from its differences to the full cache [W], nats: as `verdicts`."""
    return verdicts([differences], margin, unit)[0]


def verdicts(differences: Sequence[ArrayLike], margin: float = MARGIN, unit: str = "window") -> list[Verdict]:
    """The verdict for each method, from its differences to the full cache [W] (W may vary), nats.

    Decided by the 95% interval that `interval` gives and tables show, so verdict and interval never disagree:

    - `within_margin`: 10 units or more, high < margin. A loss with low > 0 and high < margin is real but tolerable: it
      is `within_margin` too, `shows_loss` is true and the text names the loss.
    - `worse`: 10 units or more, low > 0 and high >= margin. A loss is shown, and it may exceed the margin.
    - `not_enough_data`: everything else.

    At a true difference of 0 "worse" is wrong, at the margin "within the margin" is wrong. Each end of the interval
    allows 2.5% such errors under normal differences. One-sided 95% bounds would allow 5%, and exceed that under skew:
    on exponential differences the upper one fails for 8% at 10 units, the interval's end for 4%.
    """
    if not margin > 0 or not math.isfinite(margin):
        raise UserError(f"margin {margin:g}: give nats above 0, such as {MARGIN}")
    values = [_units(each) for each in differences]
    places: dict[int, list[int]] = {}
    for place, each in enumerate(values):
        places.setdefault(len(each), []).append(place)
    found: dict[int, Verdict] = {}
    for members in places.values():
        found.update(zip(members, _verdicts(np.stack([values[place] for place in members]), margin, unit), strict=True))
    return [found[place] for place in range(len(values))]


def _verdicts(differences: Array, margin: float, unit: str) -> list[Verdict]:
    """Verdicts of R methods on as many units each, [R, W]."""
    n = differences.shape[1]
    finite = np.asarray(np.isfinite(differences).all(axis=1))
    block = np.where(finite[:, None], differences, np.nan)
    mean, low, high = intervals(block)
    within = (high < margin) & (n >= FEWEST_UNITS)
    worse = (low > 0) & ~within & (n >= FEWEST_UNITS)
    kinds: list[Any] = np.select([within, worse], ["within_margin", "worse"], "not_enough_data").tolist()
    needed: list[int | None] = [None] * len(kinds)
    undecided = np.flatnonzero(np.asarray(finite & ~within & ~worse))
    for place, count in zip(undecided.tolist(), _needed(block[undecided], margin).tolist(), strict=True):
        needed[place] = int(count)
    numbers = zip(kinds, mean.tolist(), low.tolist(), high.tolist(), needed, strict=True)
    return [Verdict(kind, middle, left, right, n, count, margin, unit) for kind, middle, left, right, count in numbers]


def _needed(differences: Array, margin: float) -> Array:
    """Units [R] at which the interval excludes 0 or the margin with probability POWER, if mean and spread stay.

    The mean lies at least margin / 2 above 0 or below the margin, so the number is always finite.
    """
    from scipy import special

    n = differences.shape[1]
    if n < 2:
        return np.full(len(differences), float(FEWEST_UNITS))
    mean, error, _ = moments(differences)
    quantile = float(special.ndtri((1 + LEVEL) / 2))
    distance = np.maximum(mean, margin - mean)
    normal = n * ((quantile + float(special.ndtri(POWER))) * error / distance) ** 2
    fewest = FEWEST_UNITS if n < FEWEST_UNITS else n + 1
    needed: Array = np.maximum(np.ceil(normal + quantile**2), fewest)  # quantile²: the spread is estimated too
    return needed


def rounded_up(count: int) -> int:
    """To two significant digits."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def _units(differences: ArrayLike) -> Array:
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1:
        raise UserError(f"differences have shape {list(values.shape)}: give one number a unit, see window_means")
    return values
