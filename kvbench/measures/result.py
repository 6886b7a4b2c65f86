"""What a measure yields, and the rows that every measure with a cache shares. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.results.row import Row


@dataclass(frozen=True)
class Result:
    """Rows and samples that are complete and can be written."""

    rows: list[Row] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)


def engagement_rows(base: Row, engaged: float, kept_tokens: float, positions: float | None = None) -> Iterator[Row]:
    """Rows engaged, kept_tokens and, where `positions` is given, positions_processed: whether a cache was at work.

    Args:
        base: the row that they start from.
        engaged: share of what was measured that followed an eviction or a quantisation (`cache.has_compressed`).
        kept_tokens, positions: of the cache, or means over several (`cache.kept_tokens`, `cache.positions_processed`).
    """
    yield replace(base, metric="engaged", value=float(engaged), unit="share")
    yield replace(base, metric="kept_tokens", value=float(kept_tokens), unit="tokens")
    if positions is not None:
        yield replace(base, metric="positions_processed", value=float(positions), unit="positions")
