"""The slope of decode times over contexts at which the method was at work and its timing was steady."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvbench.measures.context import MethodRun
from kvbench.results.intervals import Z95
from kvbench.results.row import Row, is_exact, with_flags

FEWEST_CONTEXTS = 2
ROUNDING = 1e-6
"""Milliseconds per 1,000 tokens: equal times give a slope of this size at most."""


def slope(method: MethodRun, rows: Sequence[Row], batch: int = 1) -> list[Row]:
    """Row slope_ms_per_1k: least-squares slope of the median step, ms per 1,000 tokens of context, with its interval.

    Only contexts count at which the method evicted or quantised (exact methods need not) and the timing was steady: at
    a context that a method holds whole, the time is the full cache's. With fewer than two such contexts, or where the
    times fall beyond their interval as the context grows, the row has no value, the flag `not_computed`, and a note
    with the reason. No row where fewer than two contexts were measured.

    rows: of this method and batch, over all contexts.
    """
    medians = {row.context: row for row in rows if row.metric == "tpot_p50_ms" and row.context and row.value}
    if len(medians) < FEWEST_CONTEXTS:
        return []
    idle = [] if is_exact(method.row) else _contexts_of(rows, "engaged", medians)
    unsteady = [context for context in _contexts_of(rows, "steady", medians) if context not in idle]
    used = sorted(context for context in medians if context is not None and context not in (*idle, *unsteady))
    reasons = ", ".join(
        f"{reason} at {_listed(contexts)}"
        for contexts, reason in ((idle, "nothing was evicted or quantised"), (unsteady, "timing not steady"))
        if contexts
    )
    left_out = f" ({reasons})" if reasons else ""
    base = replace(
        method.row,
        measure="latency",
        metric="slope_ms_per_1k",
        unit="ms",
        n=len(used),
        protocol="interleaved",
        batch=batch,
    )
    if len(used) < FEWEST_CONTEXTS:
        why = f"no slope: it needs {FEWEST_CONTEXTS} contexts, {len(used)} can be used{left_out}"
        return [with_flags(replace(base, value=None, note=why), "not_computed")]
    value, low, high = fitted([medians[context] for context in used])
    if high is not None and high < -ROUNDING:
        why = f"no slope: times fall as the context grows ({value:.3g} ms per 1,000 tokens), so the machine drifted"
        return [with_flags(replace(base, value=None, note=f"{why} between contexts {_listed(used)}"), "not_computed")]
    how = "95%: from the intervals of the medians, wider where contexts scatter more; of two contexts without drift"
    note = "; ".join([f"slope over contexts {_listed(used)}{left_out}", *([how] if low is not None else [])])
    return [replace(base, value=value, low=low, high=high, note=note)]


def fitted(points: Sequence[Row]) -> tuple[float, float | None, float | None]:
    """Slope through the medians, ms per 1,000 tokens, and its bounds; None where a median has no interval.

    The slope is a weighted sum of independent medians, so the distances to their bounds add up in squares. Contexts are
    timed one after the other: where three or more scatter round the line by more than their intervals allow, both
    distances grow by the Birge ratio (R. T. Birge, 1932, Phys. Rev. 40, 207), as for measurements that drift.
    """
    x = np.array([row.context for row in points], dtype=float) / 1000
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    values = [float(row.value or 0.0) for row in points]
    slope = float(weights @ np.array(values))
    below, above = [], []
    for weight, value, row in zip(weights, values, points, strict=True):
        if row.low is None or row.high is None:
            return slope, None, None
        ends = weight * (row.low - value), weight * (row.high - value)
        below.append(min(ends))
        above.append(max(ends))
    scale = birge_ratio(x, points, slope)
    return slope, slope - scale * math.hypot(*below), slope + scale * math.hypot(*above)


def birge_ratio(x: np.ndarray, points: Sequence[Row], slope: float) -> float:
    """Scatter of the medians round the line over what their intervals allow, 1 at least; 1 for two points."""
    values = np.array([row.value for row in points], dtype=float)
    errors = np.array([((row.high or 0.0) - (row.low or 0.0)) / (2 * Z95) for row in points])
    free = len(points) - 2
    if free < 1 or (errors <= 0).any():
        return 1.0
    residuals = values - values.mean() - slope * (x - x.mean())
    return max(1.0, math.sqrt(float(((residuals / errors) ** 2).sum()) / free))


def _contexts_of(rows: Sequence[Row], metric: str, known: Iterable[int | None]) -> list[int]:
    """Contexts among `known` at which the metric is 0."""
    found = {row.context for row in rows if row.metric == metric and row.value == 0}
    return sorted(context for context in known if context is not None and context in found)


def _listed(contexts: Sequence[int]) -> str:
    return ", ".join(map(str, contexts))
