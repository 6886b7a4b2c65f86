"""Needle tables: needles found out of those hidden, by length and depth, and over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import Line
from kvbench.report.compare.names import display_name
from kvbench.report.compare.needle_hits import (
    Hits,
    Place,
    hits_of,
    place_order,
    recent_hits,
    total,
    uninformative_places,
)
from kvbench.report.tables.table import Column, Table
from kvbench.results.row import IDENTITY, Row

MARK = "†"
"""Stands beside hits at a place where the full cache finds too few needles."""
FEW_FOUND = f"{MARK} the full cache finds fewer than half: a miss may be the model's own"
RECENT = (
    "beyond recent: needles with no token among the newest ones, as many as the method's budget (without a budget: the "
    "smallest one measured beside it)"
)


def needle_tables(
    lines: Sequence[Line], identity: Sequence[Column], caption: list[str], counts: Sequence[Column]
) -> list[Table]:
    """Hits by length (if several were measured), and hits by length and depth."""
    if not lines:
        return []
    cells = [hits_of(line) for line in lines]
    contexts = list(dict.fromkeys(context for places in cells for context, _ in sorted(places, key=place_order)))
    contexts.sort(key=lambda context: -1 if context is None else context)
    several = len(contexts) > 1
    grid = _grid(lines, cells, contexts, identity, caption, several)
    if not several:
        return [grid]
    columns = []
    for context in contexts:
        at_length = [total(_at(places, context)) for places in cells]
        columns.append(_column(f"length_{context}", length_text(context), at_length, rank=1))
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
    failing = uninformative_places(lines)
    # One line per length and method, sorted by length first, so that the methods of one length stand together.
    order = [(context, index) for context in contexts or [None] for index in range(len(lines))]
    columns = [column.taken([index for _, index in order]) for column in identity]
    if several:
        lengths = [length_text(context) for context, _ in order]
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
    recent = [recent_hits(lines[index], context) for context, index in order]
    if any(recent):
        columns.append(_column("recent", "beyond recent", recent, rank=1))
        caption = [*caption, RECENT]
    if not several and contexts:
        caption = [*caption, f"length {length_text(contexts[0])}"]
    if marked:
        caption = [*caption, FEW_FOUND]
    name, title = ("needle_grid", "Needle: hits by length and depth") if several else ("needle", "Needle")
    rows = [replace(lines[index].row, context=context) for context, index in order]
    return Table(name, title, caption, tuple(columns), _records(lines, cells), not several, rows)


def length_text(context: int | None) -> str:
    return "?" if context is None else f"{context:,}"


def _column(key: str, header: str, hits: Sequence[Hits | None], rank: int = 0) -> Column:
    texts = ["–" if cell is None else str(cell) for cell in hits]
    return Column(key, header, texts, texts, rank=rank, numbers=_rates(hits))


def _rate_column(hits: Sequence[Hits | None], pooled: Sequence[Row | None]) -> Column:
    """The rate over all depths, with the interval of the row that pools them, if there is one."""
    texts = []
    for cell, row in zip(hits, pooled, strict=True):
        texts.append("–" if cell is None else rate_text(cell.rate, row))
    return Column("rate", "hit rate", texts, texts, numbers=_rates(hits))


def rate_text(rate: float, row: Row | None) -> str:
    """A hit rate with the interval of the row."""
    text = number_text.percent(rate)
    if row is None or row.low is None or row.high is None:
        return text
    return number_text.interval(text, f"{100 * row.low:.0f}%", f"{100 * row.high:.0f}%")


def _rates(hits: Sequence[Hits | None]) -> list[float | None]:
    return [None if cell is None else cell.rate for cell in hits]


def _identity(line: Line) -> dict[str, Any]:
    names = [name for name in IDENTITY if name != "context"]
    return {"method_shown": display_name(line.row)} | {name: getattr(line.row, name) for name in names}


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
    failing = uninformative_places(lines)
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
