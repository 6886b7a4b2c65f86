"""Synthetic reports with known true differences, and how often their verdicts are false.

`python -m tests.results.simulated_truth` prints the table for 500 reports a line (about a minute).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import signal, stats

from kvbench.results.method_pairs import holm, pair_p_values
from kvbench.results.paired import MARGIN, Array, verdicts, window_means

TOKENS = 32  # scored tokens of a window
CORRELATION = 0.8  # of neighbouring tokens
SHARED = 0.5  # share of the window effect's variance that all methods have in common: some windows are harder
TRUTHS = (0.0, MARGIN / 2, MARGIN, 2 * MARGIN)
WINDOWS = (8, 10, 32, 128)
FAMILY_TRUTH = np.array([0.0, 0.0, 0.0, 0.0, 2 * MARGIN, 2 * MARGIN, 2 * MARGIN])
METHODS = (  # standard deviation of a window's effect in nats, and how the effects are distributed
    (0.004, "normal"),
    (0.008, "skewed"),
    (0.015, "heavy"),
    (0.02, "skewed"),
    (0.03, "normal"),
    (0.05, "heavy"),
    (0.08, "skewed"),
)


@dataclass(frozen=True)
class Rates:
    """Shares of verdicts of all reports of one kind; by_method: [methods] for the two that can be false.

    truth: nats, None for reports in which the methods differ. family: reports with one false difference or more between
    two methods of equal truth.
    """

    windows: int
    truth: float | None
    worse: Array
    within: Array
    family: float


def rates(windows: int, truth: float | None, reports: int, seed: int) -> Rates:
    """Verdicts and comparisons of `reports` synthetic reports of seven methods each."""
    random = np.random.default_rng([seed, windows, TRUTHS.index(truth) if truth is not None else len(TRUTHS)])
    truths = FAMILY_TRUTH if truth is None else np.full(len(METHODS), truth)
    values = report_differences(random, reports, windows) + truths[:, None]
    kinds = np.array([each.kind for each in verdicts(values.reshape(-1, windows))]).reshape(reports, len(METHODS))
    first, second = np.triu_indices(len(METHODS), 1)
    equal = truths[first] == truths[second]
    family = (holm(pair_p_values(values))[:, equal] < 0.05).any(axis=1).mean()
    return Rates(windows, truth, (kinds == "worse").mean(0), (kinds == "within_margin").mean(0), float(family))


def report_differences(random: np.random.Generator, reports: int, windows: int) -> Array:
    """Differences per window with mean 0 [reports, methods, windows], from correlated tokens."""
    shared = _standard(random, "skewed", (reports, windows))
    methods = []
    for scale, kind in METHODS:
        own = _standard(random, kind, (reports, windows))
        effect = np.sqrt(SHARED) * shared + np.sqrt(1 - SHARED) * own
        tokens = correlated_tokens(random, reports * windows, kind)
        methods.append(scale * (effect + window_means(tokens).reshape(reports, windows)))
    return np.stack(methods, axis=1)


def correlated_tokens(random: np.random.Generator, windows: int, kind: str) -> Array:
    """Values of tokens [windows, TOKENS] with mean 0, variance 1 and correlation CORRELATION between neighbours."""
    steps = _standard(random, kind, (windows, TOKENS)) * np.sqrt(1 - CORRELATION**2)
    steps[:, 0] /= np.sqrt(1 - CORRELATION**2)
    tokens: Array = signal.lfilter([1.0], [1.0, -CORRELATION], steps, axis=1)
    return tokens


def _standard(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Draws with mean 0 and variance 1."""
    if kind == "skewed":
        return (random.gamma(0.5, size=shape) - 0.5) / np.sqrt(0.5)
    if kind == "heavy":
        return random.standard_t(5, size=shape) * np.sqrt(3 / 5)
    return random.standard_normal(shape)


def false_rates(found: Rates) -> tuple[Array | None, Array | None]:
    """Shares of false "worse" and false "within margin" by method; None where the verdict would be true."""
    if found.truth is None:
        return None, None
    return (found.worse if found.truth <= 0 else None), (found.within if found.truth >= MARGIN else None)


def limit(reports: int, probability: float = 0.99) -> float:
    """The largest share of false results that a true rate of 5% gives with this probability."""
    return float(stats.binom.ppf(probability, reports, 0.05)) / reports


def table(found: Sequence[Rates], reports: int) -> str:
    """The rates in percent, by windows and truth; in brackets the method with the most false verdicts."""
    limits = f"{100 * limit(reports):.1f} (single method: {100 * limit(reports, 0.999):.1f})"
    lines = [
        f"{reports} reports a line, {len(METHODS)} methods each, margin {MARGIN:g} nats. Rates in percent.",
        f"Limit for false results, 5% and binomial error: {limits}",
        "windows  true diff.  worse  within  not enough  false worse (method)  false within (method)  family-wise",
    ]
    for each in found:
        shares = [100 * each.worse.mean(), 100 * each.within.mean()]
        false = ["" if x is None else f"{100 * x.mean():.1f} ({100 * x.max():.1f})" for x in false_rates(each)]
        truth = "mixed" if each.truth is None else f"{each.truth:g}"
        lines.append(
            f"{each.windows:7}  {truth:>10}  {shares[0]:5.1f}  {shares[1]:6.1f}  {100 - sum(shares):10.1f}"
            f"  {false[0]:>20}  {false[1]:>21}  {100 * each.family:11.1f}"
        )
    return "\n".join(lines)


def simulate(windows: Sequence[int], reports: int, seed: int = 0) -> list[Rates]:
    """The rates for every number of windows and every truth, then for reports in which the methods differ."""
    return [rates(count, truth, reports, seed) for count in windows for truth in (*TRUTHS, None)]


if __name__ == "__main__":
    print(table(simulate(WINDOWS, 500), 500))
