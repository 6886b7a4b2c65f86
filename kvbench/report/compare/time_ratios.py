"""Decode times over those of the full cache in the same run, also for rows of versions that wrote no such ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.report.compare.comparison import Line, comparison_key, config_of, is_baseline
from kvbench.results.row import Row, flags_of

TIME = "tpot_p50_ms"
RATIO = "tpot_to_full"
"""Median decode step over the full cache's in the same run. Written by the latency measure with an interval."""
NOT_BESIDE = "TPOT / full's –: the full cache was not timed in the same run"


SLOPE = "slope_ms_per_1k"
NO_SLOPE = "slope –: fewer than two contexts at which the method was at work and its timing steady (see the warnings)"


def with_time_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, and a RATIO without an interval for each time that has none but a full cache of the same run."""
    known = {_place(row) for row in rows if row.metric == RATIO}
    full = {_turn(row): row for row in rows if row.metric == TIME and is_baseline(row) and row.value}
    made = []
    for row in rows:
        if row.metric != TIME or row.value is None or _place(row) in known:
            continue
        base = full.get(_turn(row))
        if base is not None and base.value:
            ratio = row.value / base.value
            made.append(replace(row, metric=RATIO, value=ratio, unit="x", low=None, high=None, n=None, note=None))
    return [*rows, *made]


def missing_ratios(lines: Sequence[Line]) -> list[str]:
    """The caption part for times without a ratio; empty where all have one."""
    return [NOT_BESIDE] if any(line.get(TIME) and not line.get(RATIO) for line in lines) else []


def missing_slopes(lines: Sequence[Line]) -> list[str]:
    """The caption part for slopes that were not computed; empty where all have one, or none was asked for."""
    found = [row for line in lines if (row := line.get(SLOPE)) is not None]
    return [NO_SLOPE] if any("not_computed" in flags_of(row) for row in found) else []


def _turn(row: Row) -> tuple[Any, ...]:
    """Equal for times of one run, model, device, context and batch."""
    return (row.run, *comparison_key(row), row.context, row.threads)


def _place(row: Row) -> tuple[Any, ...]:
    return (*_turn(row), *config_of(row))
