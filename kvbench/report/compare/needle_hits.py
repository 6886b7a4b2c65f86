"""Needles found by length and depth, and where the full cache itself finds too few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvbench.report.compare.comparison import Line, baseline_of
from kvbench.results.intervals import wilson
from kvbench.results.row import Row

Place = tuple[int | None, float | None]
"""Context, depth."""
INFORMATIVE = 0.5
"""Share of needles that the full cache must find for the hits of a method to say anything about compression."""


@dataclass(frozen=True)
class Hits:
    """`hits` needles found out of `n` hidden."""

    hits: float
    n: int

    @property
    def rate(self) -> float:
        return self.hits / self.n

    def __str__(self) -> str:
        return f"{round(self.hits, 2):g}/{self.n}"


def hits_of(line: Line) -> dict[Place, Hits]:
    """Hits at every (context, depth) that the line measured.

    A row without depth pools all depths of its context. It counts only where the depths were not measured apart.
    """
    found: dict[Place, Hits] = {}
    for (metric, context, depth), row in line.cells.items():
        if metric not in ("hit_rate", "hits") or row.value is None or not row.n:
            continue
        # `hits` is exact; the rate serves where a folder has no hits.
        if metric == "hits" or (context, depth) not in found:
            hits = row.value if metric == "hits" else round(row.value * row.n, 6)
            if 0 <= hits <= row.n:
                found[context, depth] = Hits(hits, row.n)
    apart = {context for context, depth in found if depth is not None}
    places = [place for place in found if place[1] is not None or place[0] not in apart]
    return {place: found[place] for place in sorted(places, key=place_order)}


def place_order(place: Place) -> tuple[float, float]:
    """Sorts places by context, then depth; unknown ones first."""
    context, depth = place
    return (-1 if context is None else context, -1 if depth is None else depth)


def total(hits: Iterable[Hits]) -> Hits | None:
    """Sum over cells; None over none."""
    cells = list(hits)
    return Hits(sum(cell.hits for cell in cells), sum(cell.n for cell in cells)) if cells else None


def hits_at(line: Line, context: int | None) -> Hits | None:
    """Hits at that context over all depths; None where nothing was measured."""
    return total(hits for (length, _), hits in hits_of(line).items() if length == context)


def recent_hits(line: Line, context: int | None) -> Hits | None:
    """Hits at that context among the needles that lie beyond the recent window; None where they were not split."""
    row = line.cells.get(("hit_rate_beyond_recent", context, None))
    return None if row is None or row.value is None or not row.n else Hits(row.value * row.n, row.n)


def uninformative_places(lines: Sequence[Line]) -> dict[int, set[Place]]:
    """For each line (by its index) the places where its baseline finds less than `INFORMATIVE`."""
    failing: dict[int, set[Place]] = {}
    for index, line in enumerate(lines):
        base = baseline_of(line, lines, by_context=False)
        cells = hits_of(base) if base is not None else {}
        failing[index] = {place for place, hits in cells.items() if hits.rate < INFORMATIVE}
    return failing


def over_tasks(rows: list[Row]) -> Row:
    """The hit rate over several tasks, with its interval; of one task its own row."""
    if len(rows) == 1:
        return rows[0]
    hits = Hits(sum((row.value or 0) * (row.n or 0) for row in rows), sum(row.n or 0 for row in rows))
    return _hit_rate(replace(rows[0], protocol=None), rows[0].context or 0, hits)


def pooled_rates(line: Line) -> dict[int, Row]:
    """The hit rate over all depths of each length, with its interval."""
    places = hits_of(line)
    result = {}
    for length in {context for context, _ in places if context is not None}:
        row = line.cells.get(("hit_rate", length, None))
        hits = total([hits for (context, _), hits in places.items() if context == length])
        if hits is not None:
            row = row if row is not None and row.low is not None else _hit_rate(line.row, length, hits)
            result[length] = replace(row, value=hits.rate, n=hits.n)
    return result


def _hit_rate(row: Row, length: int, hits: Hits) -> Row:
    low, high = wilson(hits.hits, hits.n)
    found = replace(row, metric="hit_rate", context=length, depth=None, value=hits.rate, n=hits.n, unit="share")
    return replace(found, low=low, high=high)
