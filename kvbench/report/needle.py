"""Needle tables: hits over samples per length and depth, and over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.report import units
from kvbench.report.lines import Line, baseline_of
from kvbench.report.names import IDENTITY
from kvbench.report.table import Column, Table
from kvbench.results.row import Row

Place = tuple[int | None, float | None]  # context, depth
INFORMATIVE = 0.5  # a full cache that finds fewer than this share tells nothing about compression
MARK = "†"


@dataclass(frozen=True)
class Hits:
    """Found needles out of `n` asked for."""

    hits: float
    n: int

    @property
    def rate(self) -> float:
        return self.hits / self.n

    def __str__(self) -> str:
        return f"{self.hits:g}/{self.n}"


def hits_of(line: Line) -> dict[Place, Hits]:
    """Hits and samples of every (context, depth) that the line measured.

    A row without depth pools all depths of its context and counts only where they were not measured apart.
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
    return {place: found[place] for place in sorted(places, key=_order)}


def _order(place: Place) -> tuple[float, float]:
    context, depth = place
    return (-1 if context is None else context, -1 if depth is None else depth)


def total(hits: Iterable[Hits]) -> Hits | None:
    """Sum over cells; None over none."""
    cells = list(hits)
    return Hits(sum(cell.hits for cell in cells), sum(cell.n for cell in cells)) if cells else None


def uninformative(lines: Sequence[Line]) -> dict[int, set[Place]]:
    """For each line (by its index) the places where its own full-cache baseline fails to find the needle."""
    failing: dict[int, set[Place]] = {}
    for index, line in enumerate(lines):
        base = baseline_of(line, lines, by_context=False)
        cells = hits_of(base) if base is not None else {}
        failing[index] = {place for place, hits in cells.items() if hits.rate < INFORMATIVE}
    return failing


def needle_tables(
    lines: Sequence[Line], identity: Sequence[Column], caption: list[str], counts: Sequence[Column]
) -> list[Table]:
    """Hits by length (if there are several), and hits by length and depth."""
    if not lines:
        return []
    cells = [hits_of(line) for line in lines]
    contexts = list(dict.fromkeys(context for places in cells for context, _ in sorted(places, key=_order)))
    contexts.sort(key=lambda context: -1 if context is None else context)
    several = len(contexts) > 1
    grid = _grid(lines, cells, contexts, identity, caption, several)
    if not several:
        return [grid]
    columns = []
    for context in contexts:
        at_length = [total(_at(places, context)) for places in cells]
        columns.append(_column(f"length_{context}", _length(context), at_length, rank=1))
    overall = [total(places.values()) for places in cells]
    columns += [_column("hits", "all", overall), _rate_column(overall, [None] * len(lines))]
    records = _totals(lines, cells, contexts)
    rows = [line.row for line in lines]
    summary = Table("needle", "Needle: hits by length", caption, (*identity, *columns, *counts), records, rows=rows)
    return [summary, grid]


def _at(places: dict[Place, Hits], context: int | None) -> list[Hits]:
    return [hits for (length, _), hits in places.items() if length == context]


def _grid(
    lines: Sequence[Line],
    cells: Sequence[dict[Place, Hits]],
    contexts: Sequence[int | None],
    identity: Sequence[Column],
    caption: list[str],
    several: bool,
) -> Table:
    known = {depth for places in cells for _, depth in places}
    depths = sorted(known, key=lambda depth: -1 if depth is None else depth)
    failing = uninformative(lines)
    # One line per (length, method), lengths outside, so that methods stand under each other.
    order = [(context, index) for context in contexts or [None] for index in range(len(lines))]
    columns = [column.taken([index for _, index in order]) for column in identity]
    if several:
        lengths = [_length(context) for context, _ in order]
        sizes = [None if context is None else float(context) for context, _ in order]
        columns.append(Column("context", "length", lengths, lengths, numbers=sizes))
    marked = False
    for depth in depths:
        texts = []
        for context, index in order:
            hits = cells[index].get((context, depth))
            bad = hits is not None and (context, depth) in failing[index]
            marked |= bad
            texts.append("–" if hits is None else f"{hits}{MARK if bad else ''}")
        header = "any depth" if depth is None else f"depth {100 * depth:g}%"
        found = [cells[index].get((context, depth)) for context, index in order]
        columns.append(Column(f"depth_{depth}", header, texts, texts, rank=1, numbers=_rates(found)))
    overall = [total(_at(cells[index], context)) for context, index in order]
    pooled = [lines[index].cells.get(("hit_rate", context, None)) for context, index in order]
    columns += [_column("hits", "all", overall), _rate_column(overall, pooled)]
    if not several and contexts:
        caption = [*caption, f"length {_length(contexts[0])}"]
    if marked:
        caption = [*caption, f"{MARK} the full cache itself finds fewer than half: says little on compression"]
    name, title = ("needle_grid", "Needle: hits by length and depth") if several else ("needle", "Needle")
    rows = [replace(lines[index].row, context=context) for context, index in order]
    return Table(name, title, caption, tuple(columns), _records(lines, cells), not several, rows)


def _length(context: int | None) -> str:
    return "?" if context is None else f"{context:,}"


def _column(key: str, header: str, hits: Sequence[Hits | None], rank: int = 0) -> Column:
    texts = ["–" if cell is None else str(cell) for cell in hits]
    return Column(key, header, texts, texts, rank=rank, numbers=_rates(hits))


def _rate_column(hits: Sequence[Hits | None], pooled: Sequence[Row | None]) -> Column:
    """The rate over all depths, with the interval of the row that pools them, if there is one."""
    texts = []
    for cell, row in zip(hits, pooled, strict=True):
        text = "–" if cell is None else units.percent(cell.rate)
        if cell is not None and row is not None and row.low is not None and row.high is not None:
            text = units.interval(text, f"{100 * row.low:.0f}%", f"{100 * row.high:.0f}%")
        texts.append(text)
    return Column("rate", "hit rate", texts, texts, numbers=_rates(hits))


def _rates(hits: Sequence[Hits | None]) -> list[float | None]:
    return [None if cell is None else cell.rate for cell in hits]


def _identity(line: Line) -> dict[str, Any]:
    names = [name for name in IDENTITY if name != "context"]
    return {"method_shown": line.name} | {name: getattr(line.row, name) for name in names}


def _totals(
    lines: Sequence[Line], cells: Sequence[dict[Place, Hits]], contexts: Sequence[int | None]
) -> list[dict[str, Any]]:
    records = []
    for line, places in zip(lines, cells, strict=True):
        for context in contexts:
            hits = total(_at(places, context))
            if hits is not None:
                numbers = {"context": context, "hits": hits.hits, "n": hits.n, "hit_rate": hits.rate}
                records.append(_identity(line) | numbers)
    return records


def _records(lines: Sequence[Line], cells: Sequence[dict[Place, Hits]]) -> list[dict[str, Any]]:
    records = []
    failing = uninformative(lines)
    for index, line in enumerate(lines):
        for (context, depth), hits in cells[index].items():
            row = line.cells.get(("hit_rate", context, depth))
            records.append(
                {
                    **_identity(line),
                    "context": context,
                    "depth": depth,
                    "hits": hits.hits,
                    "n": hits.n,
                    "hit_rate": hits.rate,
                    "low": row.low if row else None,
                    "high": row.high if row else None,
                    "informative": (context, depth) not in failing[index],
                }
            )
    return records
