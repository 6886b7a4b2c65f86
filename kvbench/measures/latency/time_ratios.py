"""Decode times of a method over those of the full cache in the same process and the same turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvbench.measures.statistics import bounds, median_ratio_interval
from kvbench.results.row import Row


def ratio_row(base: Row, step_ms: Sequence[float], full_ms: Sequence[float], seed: int) -> Row:
    """Row tpot_to_full: the method's median step over the full cache's. Below 1 the method is faster.

    Step i of both ran in the same turn, so the interval draws both together: a drift of the machine cancels. Where a
    method ran fewer steps, only those are compared. `n`: pairs.
    """
    pairs = min(len(step_ms), len(full_ms))
    mine, full = np.array(step_ms[:pairs]), np.array(full_ms[:pairs])
    note = "median step over the full cache's in the same process; 95%: bootstrap over pairs of steps"
    return replace(
        base,
        metric="tpot_to_full",
        value=float(np.median(mine) / np.median(full)),
        unit="x",
        n=pairs,
        note="; ".join(filter(None, (note, base.note))),
        **bounds(median_ratio_interval(mine, full, seed)),
    )
