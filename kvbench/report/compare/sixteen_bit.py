"""How many times smaller than a full cache in 16 bits the scored cache is."""

from __future__ import annotations

from dataclasses import replace

from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.scored_bytes import SCORED, same_cache
from kvbench.results.row import Row

METRIC = "x_smaller"
DERIVED = "x_smaller_after_scoring"
"""Made here, for rows of older versions, from the bytes after scoring of the method and of the full cache."""
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def smaller_row(member: MethodNumbers, group: Group) -> Row | None:
    """The row of `x_smaller`, or for older rows one made from held bytes; None where neither is known."""
    measured = member.numbers.get(METRIC)
    if measured is not None:
        return measured if _positive(measured.value) else None
    size, base = member.scored, group.baseline
    held, full = member.held, None if base is None else base.held
    bits = BITS.get(group.row.dtype or "")
    if size is None or base is None or base.scored is None or not _positive(held) or not _positive(full) or not bits:
        return None
    if base.scored.context != size.context or base.scored.metric != size.metric:
        return None
    metric = METRIC if size.metric == SCORED else DERIVED
    return replace(size, metric=metric, value=(full or 0) * 16 / bits / (held or 1), unit="x", low=None, high=None)


def times_sixteen_bit(member: MethodNumbers, group: Group, quality: Row) -> Row | None:
    """`smaller_row`, if it is of the cache that the quality was scored with."""
    row = smaller_row(member, group)
    return row if row is not None and same_cache(quality, row) else None


def _positive(value: float | None) -> bool:
    return value is not None and 0 < value < float("inf")
