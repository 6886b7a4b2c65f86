"""Which error of the cache goes with the KL of the predictions: rank correlations over the methods of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.report.compare.comparison import Line, comparison_key

Array = NDArray[np.float64]

PREDICTED = "kl"
CANDIDATES = (
    "key_error",
    "value_error",
    "key_cosine",
    "logit_error",
    "logit_correlation",
    "logit_correlation_worst_layer",
    "attention_kl",
    "output_error",
    "output_error_worst_layer",
    "residual_error",
)
"""Metrics of the measure `error` that might tell the KL of the predictions without running the model's head."""
FEWEST_METHODS = 6
"""Methods below which no correlation is computed."""
Z = 1.959964
"""Two-sided 95% of the normal distribution."""


@dataclass(frozen=True)
class Predictor:
    """A metric's rank correlation with the KL of the predictions over n methods.

    spearman: +1, the methods have the same order by both. low, high: 95%, by Fisher's z with Bonett and Wright's
    standard error (2000, Psychometrika 65). lines: the methods.
    """

    metric: str
    spearman: float
    low: float
    high: float
    n: int


def predictors(lines: Sequence[Line]) -> list[Predictor]:
    """Every candidate that the methods of one setting were measured by, the strongest correlation first.

    Empty for fewer than FEWEST_METHODS methods beside the full cache; bounds that see the future count as methods.
    """
    methods = [line for line in lines if not line.baseline and (line.value(PREDICTED) or 0) > 0]
    found = []
    for metric in CANDIDATES:
        pairs = [(line.value(metric), line.value(PREDICTED)) for line in methods]
        known = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a + b)]
        if len(known) >= FEWEST_METHODS:
            found.append(_predictor(metric, np.array(known)))
    return sorted(found, key=lambda one: -abs(one.spearman))


def settings_of(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines by setting: one model, device, text and context each."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((comparison_key(line.row), line.row.context), []).append(line)
    return list(groups.values())


def spearman(first: Array, second: Array) -> float:
    """Pearson's correlation of the ranks, ties with their mean rank; 0 where one of them does not vary."""
    ranks = [pd.Series(values).rank().to_numpy() for values in (first, second)]
    if any(np.ptp(each) == 0 for each in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _predictor(metric: str, pairs: Array) -> Predictor:
    found, n = spearman(pairs[:, 0], pairs[:, 1]), len(pairs)
    nearest = 1 - 12 / (n * (n**2 - 1))  # one swap of neighbours from a perfect order: an interval around ±1 is a point
    inside = min(max(found, -nearest), nearest)
    error = math.sqrt((1 + inside**2 / 2) / (n - 3))
    low, high = (math.tanh(math.atanh(inside) + side * Z * error) for side in (-1, 1))
    return Predictor(metric, found, min(low, found), max(high, found), n)
