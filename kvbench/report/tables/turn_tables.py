"""Turn tables: one for each task and mode, with the first question after and before compression side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import Line, baseline_of
from kvbench.report.compare.needle_hits import INFORMATIVE
from kvbench.report.tables.columns import caption_of, identity_columns
from kvbench.report.tables.needle_tables import MARK, rate_text
from kvbench.report.tables.table import Column, Table
from kvbench.results.row import IDENTITY, Row

TURNS = "turns"
FEW_FOUND = f"{MARK} the full cache answers fewer than half: a miss may be the model's own"
BEFORE = "before: the first question is compressed together with the text, later turns ask something else"
BY_COLUMN = ("question", "protocol")
"""Columns of a row that tell two numbers of one line apart."""
COLUMNS = {
    "hit_rate": ("all turns", 0),
    "hit_rate_first": ("turn 1", 0),
    "hit_rate_later": ("later turns", 0),
    "later_minus_first": ("later above turn 1, points", 1),
    "hit_rate_minus_full": ("above full, points", 2),
}
"""By metric: the header, and which columns a narrow terminal leaves out first."""
DIFFERENCES = ("later_minus_first", "hit_rate_minus_full")


def turn_tables(lines: Sequence[Line], origin: Sequence[str]) -> list[Table]:
    """A table for each task and mode. origin: parts of the caption on versions and machines."""
    protocols = dict.fromkeys(line.row.protocol for line in lines)
    return [_table(name, [line for line in lines if line.row.protocol == name], origin) for name in protocols]


def _table(protocol: str | None, lines: Sequence[Line], origin: Sequence[str]) -> Table:
    methods: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        key = tuple(getattr(line.row, name) for name in IDENTITY if name not in BY_COLUMN)
        methods.setdefault(key, {})[line.row.question or "after"] = line
    of_method = list(methods.values())
    first = [next(iter(one.values())) for one in of_method]
    columns = identity_columns(first, skip=BY_COLUMN)
    caption = [*caption_of(first, skip=BY_COLUMN), *origin]
    questions = sorted({line.row.question or "after" for line in lines})
    for question in questions:
        columns += _columns(question, [one.get(question) for one in of_method], lines)
    if "before" in questions:
        caption.append(BEFORE)
    if any(MARK in text for column in columns for text in column.full):
        caption.append(FEW_FOUND)
    task, _, mode = (protocol or "?").partition("/")
    title = f"Turns: {task.replace('_', ' ')}, {mode}" if mode else f"Turns: {task}"
    name = "_".join(filter(None, (TURNS, task, mode)))
    records = [_record(one) for one in of_method]
    return Table(name, title, caption, tuple(columns), records, rows=[line.row for line in first])


def _columns(question: str, found: Sequence[Line | None], lines: Sequence[Line]) -> list[Column]:
    columns = []
    marks = [MARK if line is not None and _few_found(line, lines) else "" for line in found]
    for metric, (header, rank) in COLUMNS.items():
        rows = [None if line is None else line.get(metric) for line in found]
        if not any(rows):
            continue
        signed = metric in DIFFERENCES
        write = difference_text if signed else hit_rate_text
        full = [f"{write(row)}{mark}" if row is not None else "–" for row, mark in zip(rows, marks, strict=True)]
        compact = [text.split(" [")[0] + (mark if " [" in text else "") for text, mark in zip(full, marks, strict=True)]
        numbers = [None if row is None else row.value for row in rows]
        key = f"{question}_{metric}"
        columns.append(Column(key, f"{question}: {header}", full, compact, rank=rank, numbers=numbers, better="high"))
    return columns


def hit_rate_text(row: Row) -> str:
    """A hit rate with its interval."""
    return "–" if row.value is None else rate_text(row.value, row)


def difference_text(row: Row) -> str:
    """A difference of hit rates in points, with its interval."""
    if row.value is None:
        return "–"
    if row.low is None or row.high is None:
        return _points(row.value)
    return number_text.interval(_points(row.value), _points(row.low), _points(row.high))


def _points(share: float) -> str:
    points = round(100 * share)
    return f"{points:+d}" if points else "0"


def _few_found(line: Line, lines: Sequence[Line]) -> bool:
    base = baseline_of(line, [other for other in lines if other.row.question == line.row.question])
    rate = None if base is None else base.value("hit_rate")
    return rate is not None and rate < INFORMATIVE


def _record(of_method: dict[str, Line]) -> dict[str, Any]:
    """Unrounded numbers with intervals and n, and the hit rate at each turn."""
    row = next(iter(of_method.values())).row
    record = {name: getattr(row, name) for name in IDENTITY if name != "question"}
    for question, line in sorted(of_method.items()):
        for (metric, _, _), cell in line.cells.items():
            key = f"{question}_{metric}"
            record |= {key: cell.value, f"{key}_low": cell.low, f"{key}_high": cell.high, f"{key}_n": cell.n}
        for (metric, _), curve in line.curves.items():
            record |= {f"{question}_{metric}_{turn}": cell.value for turn, cell in sorted(curve.items())}
    return record
