"""A table: columns of text for people, records of unrounded numbers for files, and its form in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.results.row import Row

INTERVAL = re.compile(r"^(.+?) (\[.+\])$")
"""Splits a cell into its number and its interval."""
GAP = 2
NARROWEST = 8
"""Characters between two columns in a terminal."""


@dataclass(frozen=True)
class Column:
    """One column of text.

    full: cells for pages; compact: for terminals, where columns of the highest rank are left out first. left: aligned
    to the left. numbers: what to sort by, the text if empty. best: lines better than all others beyond the intervals.
    whole: a name, never wrapped or cut. better: `low`, `high` or None, which values are good.
    """

    key: str
    header: str
    full: list[str]
    compact: list[str]
    left: bool = False
    rank: int = 0
    numbers: Sequence[float | None] = ()
    best: frozenset[int] = frozenset()
    whole: bool = False
    better: str | None = None

    def taken(self, order: Sequence[int]) -> Column:
        """The column with the cells of these lines; a line may come several times."""
        numbers = [self.numbers[i] for i in order] if self.numbers else ()
        best = frozenset(place for place, i in enumerate(order) if i in self.best)
        full, compact = [self.full[i] for i in order], [self.compact[i] for i in order]
        return replace(self, full=full, compact=compact, numbers=numbers, best=best)

    def narrow_header(self, cells: Sequence[str] | None = None) -> str:
        """The header broken into lines no wider than `cells` (default: `compact`), where words allow it."""
        lines: list[str] = []
        width = max(map(len, self.compact if cells is None else cells), default=0)
        for word in self.header.split():
            if lines and len(lines[-1]) + 1 + len(word) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """A table under one title.

    name: its file name. caption: what is the same on all lines, part by part. records: the lines of the CSV.
    terminal: False for the page and the files only. rows: for each line one of its rows, from which the command that
    measures it again is made. page_only: parts of the caption that a terminal leaves out.
    """

    name: str
    title: str
    caption: list[str]
    columns: tuple[Column, ...]
    records: list[dict[str, Any]]
    terminal: bool = True
    rows: Sequence[Row] = ()
    page_only: Sequence[str] = ()

    @property
    def height(self) -> int:
        return len(self.columns[0].full)


def text_column(key: str, header: str, cells: list[str], rank: int = 0, *, whole: bool = False) -> Column:
    """A left-aligned column whose cells need no short form."""
    return Column(key, header, cells, cells, left=True, rank=rank, whole=whole)


def columns_that_fit(table: Table, width: int) -> tuple[list[Column], list[str]]:
    """The columns that a terminal of `width` characters can hold, and the headers of those left out.

    Columns of the highest rank are left out first. Where a column of names must keep its width, numbers are left out
    next, from the right; other words wrap, down to `NARROWEST` characters.
    """
    kept, dropped = list(table.columns), []
    while _width(kept) > width and any(column.rank for column in kept):
        last = max(range(len(kept)), key=lambda index: (kept[index].rank, index))
        dropped.append(kept.pop(last).header)
    has_names = any(column.whole for column in kept)
    while has_names and _width(kept, wrapped=True) > width and any(not column.left for column in kept):
        last = max(index for index, column in enumerate(kept) if not column.left)
        dropped.append(kept.pop(last).header)
    return kept, dropped


def _width(columns: Sequence[Column], *, wrapped: bool = False) -> int:
    """Characters that the columns need. wrapped: with the columns of words as narrow as they may get."""
    return sum(
        (min(_cell_width(column), NARROWEST) if wrapped and column.left and not column.whole else _cell_width(column))
        + GAP
        for column in columns
    )


def _cell_width(column: Column) -> int:
    return max(map(len, [*column.narrow_header().split("\n"), *column.compact]))


def shared_caption(tables: Sequence[Table]) -> list[str]:
    """Caption parts that all tables share; they are shown once, above the tables."""
    captions = [table.caption for table in tables]
    first = captions[0] if captions else []
    return [part for part in first if all(part in caption for caption in captions)]


def for_terminal(table: Table, width: int, shared: Sequence[str] = ()) -> RichTable:
    """The table with the columns that fit `width` characters. shared: caption parts that are shown elsewhere."""
    columns, dropped = columns_that_fit(table, width)
    own = [part for part in table.caption if part not in (*shared, *table.page_only)]
    if dropped:
        own.append(f"not shown here: {', '.join(dropped)}")
    shown = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0),
        caption=" · ".join(own),
        caption_justify="left",
        caption_style="dim",
    )
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        wraps = column.left and not (column.whole and _cell_width(column) + GAP <= width)
        header = column.narrow_header()
        shown.add_column(header, vertical="bottom", justify=justify, no_wrap=not wraps, overflow="fold")
    for cells in zip(*(column.compact for column in columns), strict=True):
        shown.add_row(*map(Text, cells))
    return shown
