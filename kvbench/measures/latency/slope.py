"""The slope of decode times over contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvbench.measures.context import MethodRun
from kvbench.results.row import Row


def slope(method: MethodRun, medians: list[tuple[int, float]], batch: int = 1) -> list[Row]:
    """Least-squares slope of the median step over contexts, ms per 1,000 context tokens."""
    if len(medians) < 2:
        return []
    contexts, times = zip(*medians, strict=True)
    slope = float(np.polyfit(np.array(contexts) / 1000, np.array(times), 1)[0])
    note = "contexts " + ", ".join(map(str, contexts))
    return [
        replace(
            method.row,
            measure="latency",
            metric="slope_ms_per_1k",
            value=slope,
            unit="ms",
            n=len(medians),
            protocol="interleaved",
            batch=batch,
            note=note,
        )
    ]
