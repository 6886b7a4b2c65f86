"""Bytes of the cache that a quality number was scored with: from the same measure, context and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbench.results.row import Row

SCORED = "scored_bytes"
"""Mean over the scored tokens."""
HELD = "held_bytes"
"""After the last scored token: rows of older versions have no mean."""
METRICS = (SCORED, HELD)


def bytes_metric(methods: Iterable[Mapping[str, Row]]) -> str:
    """The metric that serves all methods, each given as its rows by metric: SCORED if all with bytes have it."""
    known = [numbers for numbers in methods if SCORED in numbers or HELD in numbers]
    return SCORED if all(SCORED in numbers for numbers in known) else HELD


def same_cache(quality: Row, size: Row) -> bool:
    """True if both numbers were taken on one cache: by one measure, at one context, in one run."""
    return (quality.measure, quality.context, quality.run) == (size.measure, size.context, size.run)


def size_of(row: Row | None) -> float | None:
    """Bytes of one sequence."""
    return None if row is None or row.value is None else row.value / (row.batch or 1)
