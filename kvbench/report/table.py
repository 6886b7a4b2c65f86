"""The table as such: columns of text for people, records of raw numbers for files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.results.row import Row

INTERVAL = re.compile(r"^(.+?) (\[.+\])$")  # a cell with one: the number, and the interval
GAP = 2  # characters between two columns in a terminal


@dataclass(frozen=True)
class Column:
    """One column: `full` cells for pages, `compact` ones for terminals, which drop the highest rank first."""

    key: str
    header: str
    full: list[str]
    compact: list[str]
    left: bool = False
    rank: int = 0
    numbers: Sequence[float | None] = ()  # what to sort by; empty: by the text
    best: frozenset[int] = frozenset()  # lines that are better than every other one beyond the interval

    def taken(self, order: Sequence[int]) -> Column:
        """The same column with its cells in another order, some perhaps repeated."""
        numbers = [self.numbers[i] for i in order] if self.numbers else ()
        best = frozenset(place for place, i in enumerate(order) if i in self.best)
        full, compact = [self.full[i] for i in order], [self.compact[i] for i in order]
        return replace(self, full=full, compact=compact, numbers=numbers, best=best)

    def narrow_header(self) -> str:
        """The header broken over lines, so that it is no wider than its cells need."""
        lines: list[str] = []
        width = max(map(len, self.compact), default=0)
        for word in self.header.split():
            if lines and len(lines[-1]) + 1 + len(word) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """A comparison; `name` is its file name, `records` are the CSV's lines."""

    name: str
    title: str
    caption: list[str]  # what is the same on all lines, part by part
    columns: tuple[Column, ...]
    records: list[dict[str, Any]]
    terminal: bool = True  # False: for the page and the files only
    rows: Sequence[Row] = ()  # for each line one of its rows: what it takes to measure it again

    @property
    def height(self) -> int:
        return len(self.columns[0].full)


def text_column(key: str, header: str, cells: list[str], rank: int = 0) -> Column:
    """A left-aligned column whose cells need no short form."""
    return Column(key, header, cells, cells, left=True, rank=rank)


def fitting(table: Table, width: int) -> tuple[list[Column], list[str]]:
    """The columns that a terminal of `width` characters can hold whole, and the headers of those left out."""
    kept, dropped = list(table.columns), []
    while _width(kept) > width and any(column.rank for column in kept):
        last = max(range(len(kept)), key=lambda index: (kept[index].rank, index))
        dropped.append(kept.pop(last).header)
    return kept, dropped


def _width(columns: Sequence[Column]) -> int:
    return sum(max(map(len, [*column.narrow_header().split("\n"), *column.compact])) + GAP for column in columns)


def to_csv(table: Table) -> str:
    """The records as CSV, without the columns that are empty throughout."""
    keys = dict.fromkeys(key for record in table.records for key in record)
    header = [key for key in keys if any(record.get(key) is not None for record in table.records)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.records)
    return buffer.getvalue()


def to_markdown(table: Table) -> str:
    """A pipe table, columns padded so that the source reads well too."""
    columns = [[_escaped(cell) for cell in (column.header, *_marked(column))] for column in table.columns]
    widths = [max(3, *map(len, cells)) for cells in columns]
    padded = []
    for column, cells, width in zip(table.columns, columns, widths, strict=True):
        rule = "-" * width if column.left else "-" * (width - 1) + ":"
        cells.insert(1, rule)
        padded.append([cell.ljust(width) if column.left else cell.rjust(width) for cell in cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in zip(*padded, strict=True))


def _marked(column: Column) -> list[str]:
    return [f"**{cell}**" if index in column.best else cell for index, cell in enumerate(column.full)]


def to_parquet(table: Table) -> bytes:
    """The records as a parquet file, with the columns of the CSV."""
    buffer = pa.BufferOutputStream()
    frame = pd.DataFrame.from_records(table.records).dropna(axis="columns", how="all")
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), buffer)
    content: bytes = buffer.getvalue().to_pybytes()
    return content


def to_latex(table: Table) -> str:
    """A `table` environment in booktabs rules, the best of a column in bold, no wider than the text.

    It needs \\usepackage{booktabs,graphicx}. Columns that give way on a narrow page are left to the CSV.
    """
    columns = [column for column in table.columns if column.rank < 2]
    spec = "".join("l" if column.left else "r" for column in columns)
    lines = [" & ".join(_latex(column.header) for column in columns) + r" \\", r"\midrule"]
    lines += [" & ".join(_latex_cell(column, index) for column in columns) + r" \\" for index in range(table.height)]
    caption = ". ".join([table.title, ", ".join(table.caption)]).rstrip(". ") + "."
    return (
        "\n".join(
            [
                r"\begin{table}",
                r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
                rf"\caption{{{_latex(caption)}}}",
                rf"\label{{tab:{table.name}}}",
                rf"\sbox0{{\begin{{tabular}}{{{spec}}}",
                r"\toprule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}}%",
                r"\ifdim\wd0>\textwidth\resizebox{\textwidth}{!}{\usebox0}\else\usebox0\fi",
                r"\end{table}",
            ]
        )
        + "\n"
    )


def _latex_cell(column: Column, index: int) -> str:
    """The number, bold where it is the best, its interval in small print."""
    found = INTERVAL.match(column.full[index])
    number, interval = found.groups() if found and not column.left else (column.full[index], "")
    text = rf"\textbf{{{_latex(number)}}}" if index in column.best else _latex(number)
    return rf"{text} {{\tiny {_latex(interval)}}}" if interval else text


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "Δ": r"$\Delta$",
    "–": "--",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    ">": r"$>$",
    "<": r"$<$",
    "·": r"$\cdot$",
}


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
