"""The slope of decode times over contexts at which the method was at work and its timing was steady."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvbench.measures.context import MethodRun
from kvbench.results.row import Row, is_exact, with_flags

FEWEST_CONTEXTS = 2


def slope(method: MethodRun, rows: Sequence[Row], batch: int = 1) -> list[Row]:
    """Row slope_ms_per_1k: least-squares slope of the median step, ms per 1,000 tokens of context, with its interval.

    Only contexts count at which the method evicted or quantised (exact methods need not) and the timing was steady: at
    a context that a method holds whole, the time is the full cache's. With fewer than two such contexts the row has no
    value, the flag `not_computed`, and a note with the reason. No row where fewer than two contexts were measured.

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
    how = "95%: from the intervals of the medians, without drift between contexts"
    note = "; ".join([f"slope over contexts {_listed(used)}{left_out}", *([how] if low is not None else [])])
    return [replace(base, value=value, low=low, high=high, note=note)]


def fitted(points: Sequence[Row]) -> tuple[float, float | None, float | None]:
    """Slope through the medians, ms per 1,000 tokens, and its bounds; None where a median has no interval.

    The slope is a weighted sum of independent medians, so the distances to their bounds add up in squares.
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
    return slope, slope - math.hypot(*below), slope + math.hypot(*above)


def _contexts_of(rows: Sequence[Row], metric: str, known: Iterable[int | None]) -> list[int]:
    """Contexts among `known` at which the metric is 0."""
    found = {row.context for row in rows if row.metric == metric and row.value == 0}
    return sorted(context for context in known if context is not None and context in found)


def _listed(contexts: Sequence[int]) -> str:
    return ", ".join(map(str, contexts))
