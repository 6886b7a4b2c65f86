"""Needle tables by task: the question after and before compression side by side, and hits beyond the recent window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import Line, baseline_of
from kvbench.report.compare.needle_hits import INFORMATIVE, Hits, hits_at, recent_hits
from kvbench.report.tables.columns import caption_of, identity_columns
from kvbench.report.tables.needle_tables import FEW_FOUND, MARK, RECENT, length_text, rate_text
from kvbench.report.tables.table import Column, Table
from kvbench.results.row import IDENTITY, Row

BY_COLUMN = ("question", "protocol", "context")
"""Columns of a row that tell two numbers of one line apart."""
Place = tuple[int, int | None]
"""Number of a method in a table, and context."""


def needle_task_tables(lines: Sequence[Line]) -> list[Table]:
    """One table a task, where there are several tasks or both times of the question. lines: over all contexts."""
    tasks = list(dict.fromkeys(line.row.protocol for line in lines))
    questions = sorted({line.row.question or "after" for line in lines})
    if len(tasks) < 2 and len(questions) < 2:
        return []
    return [_task_table(task, questions, [line for line in lines if line.row.protocol == task]) for task in tasks]


def _task_table(task: str | None, questions: Sequence[str], lines: Sequence[Line]) -> Table:
    methods: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        key = tuple(getattr(line.row, name) for name in IDENTITY if name not in BY_COLUMN)
        methods.setdefault(key, {})[line.row.question or "after"] = line
    of_method = list(methods.values())
    known = {context for line in lines for _, context, _ in line.cells}
    contexts = sorted(known, key=lambda context: -1 if context is None else context) or [None]
    places: list[Place] = [(index, context) for context in contexts for index in range(len(of_method))]
    first = [next(iter(one.values())) for one in of_method]
    columns = [c.taken([i for i, _ in places]) for c in identity_columns(first, skip=BY_COLUMN)]
    caption = caption_of(first, skip=BY_COLUMN)
    if len(contexts) > 1:
        lengths = [length_text(context) for _, context in places]
        sizes = [None if context is None else float(context) for _, context in places]
        columns.append(Column("context", "length", lengths, lengths, numbers=sizes))
    else:
        caption.append(f"length {length_text(contexts[0])}")
    for question in questions:
        columns += _question_columns(question, [(of_method[i].get(question), context) for i, context in places], lines)
    if any(MARK in text for column in columns for text in column.full):
        caption.append(FEW_FOUND)
    if any("recent" in column.key for column in columns):
        caption.append(RECENT)
    records = [_record(of_method[i], context, questions) for i, context in places]
    rows = [first[i].row for i, _ in places]
    return Table(f"needle_{task}", f"Needle: {task}", caption, tuple(columns), records, terminal=False, rows=rows)


def _question_columns(
    question: str, places: Sequence[tuple[Line | None, int | None]], lines: Sequence[Line]
) -> list[Column]:
    """Hits, hit rate, hits beyond the recent window and what these lie above the full cache's."""
    found = [None if line is None else hits_at(line, context) for line, context in places]
    recent = [None if line is None else recent_hits(line, context) for line, context in places]
    above = [_cell(line, "hit_rate_beyond_recent_minus_full", context) for line, context in places]
    marks = [MARK if line is not None and _few_found(line, context, lines) else "" for line, context in places]
    hits = [f"{_hits(one)}{mark}" for one, mark in zip(found, marks, strict=True)]
    rates = [_rate(line, "hit_rate", context) for line, context in places]
    columns = [
        Column(f"{question}_hits", f"{question}: hits", hits, hits, numbers=_rates(found)),
        Column(f"{question}_rate", f"{question}: hit rate", rates, rates, numbers=_rates(found)),
    ]
    if any(recent):
        texts, key = [_hits(one) for one in recent], f"{question}_recent"
        columns.append(Column(key, f"{question}: beyond recent", texts, texts, numbers=_rates(recent)))
    if any(above):
        texts, key = [_signed(row) for row in above], f"{question}_recent_above"
        numbers = [None if row is None else row.value for row in above]
        columns.append(Column(key, f"{question}: beyond recent, above full", texts, texts, numbers=numbers))
    return columns


def _few_found(line: Line, context: int | None, lines: Sequence[Line]) -> bool:
    base = baseline_of(line, lines, by_context=False)
    hits = None if base is None else hits_at(base, context)
    return hits is not None and hits.rate < INFORMATIVE


def _cell(line: Line | None, metric: str, context: int | None) -> Row | None:
    return None if line is None else line.cells.get((metric, context, None))


def _rate(line: Line | None, metric: str, context: int | None) -> str:
    row = _cell(line, metric, context)
    return "–" if row is None or row.value is None else rate_text(row.value, row)


def _signed(row: Row | None) -> str:
    if row is None or row.value is None:
        return "–"
    text = f"{_points(row.value)} points"
    if row.low is None or row.high is None:
        return text
    return number_text.interval(text, _points(row.low), _points(row.high))


def _points(share: float) -> str:
    """A difference of shares in points, with its sign; 0 without one."""
    points = round(100 * share)
    return f"{points:+d}" if points else "0"


def _hits(hits: Hits | None) -> str:
    return "–" if hits is None else str(hits)


def _rates(hits: Sequence[Hits | None]) -> list[float | None]:
    return [None if one is None else one.rate for one in hits]


def _record(of_method: dict[str, Line], context: int | None, questions: Sequence[str]) -> dict[str, Any]:
    """Unrounded numbers of all rates over all depths, with intervals and n."""
    row = next(iter(of_method.values())).row
    record = {name: getattr(row, name) for name in IDENTITY if name != "question"} | {"context": context}
    for question in questions:
        line = of_method.get(question)
        cells = {} if line is None else line.cells
        for (metric, at, depth), cell in cells.items():
            if at == context and depth is None and metric.startswith("hit"):
                record |= {f"{question}_{metric}": cell.value, f"{question}_{metric}_n": cell.n}
                record |= {f"{question}_{metric}_low": cell.low, f"{question}_{metric}_high": cell.high}
    return record
