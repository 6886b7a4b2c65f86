"""Rows of one measure, gathered into the lines of a comparison."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.report.names import IDENTITY, config_of, display_name, is_baseline, layout_of
from kvbench.results.row import KNOBS, Row

Cell = tuple[str, int | None, float | None]  # metric, context, depth
# What a method and its baseline must share to be compared, and what they had better share.
SETTING = ("model", "kv_heads", "converted", "dataset", "question", "batch", "dtype", "device")
PREFERRED = ("revision", "protocol", "kernel", "threads", "seed")


@dataclass
class Line:
    """One compared thing in one setting, with all its numbers."""

    row: Row  # any of its rows: they agree on everything in IDENTITY but, at times, the context
    cells: dict[Cell, Row] = field(default_factory=dict)
    curves: dict[tuple[str, int | None], dict[int, Row]] = field(default_factory=dict)  # (metric, context): by position
    failures: list[Row] = field(default_factory=list)
    repeats: int = 0  # older numbers that a later run measured again

    @property
    def name(self) -> str:
        return display_name(self.row)

    @property
    def baseline(self) -> bool:
        return is_baseline(self.row)

    def get(self, metric: str) -> Row | None:
        """The row of a metric that the line holds once; None if it was not measured."""
        found = [row for (name, _, _), row in self.cells.items() if name == metric]
        return found[-1] if found else None

    def values(self, metric: str) -> list[float]:
        """The distinct values of a metric over the contexts and depths of this line, in ascending order."""
        found = {row.value for (name, _, _), row in self.cells.items() if name == metric}
        return sorted(value for value in found if value is not None)

    def value(self, metric: str) -> float | None:
        row = self.get(metric)
        return None if row is None else row.value

    def add(self, row: Row) -> None:
        """Keep a row; of two rows for one cell the later one stays, unless only the earlier one succeeded."""
        if row.status != "ok" or row.metric is None:
            self.failures.append(row)
            return
        if row.position is not None:
            curve = self.curves.setdefault((row.metric, row.context), {})
            self.repeats += row.position in curve
            curve[row.position] = row
            return
        cell = (row.metric, row.context, row.depth)
        self.repeats += cell in self.cells
        self.cells[cell] = row

    @property
    def status(self) -> str:
        """`ok`, or what became of the line if nothing could be measured."""
        return self.failures[-1].status if self.failures and not self.cells else "ok"


def lines_of(rows: Iterable[Row], measure: str, *, by_context: bool = True) -> list[Line]:
    """The lines of one measure: the baseline on top of each setting, then the methods as they were measured first.

    The budgets of a method stand together, in ascending order.

    With `by_context` each context length is a line of its own, and a row without context (a slope over contexts)
    belongs to every line of its method that it does not contradict.
    """
    lines: dict[tuple[Any, ...], Line] = {}
    selected = [row for row in rows if row.measure == measure and row.method is not None]
    names = tuple(name for name in IDENTITY if by_context or name != "context")
    general = [row for row in selected if by_context and row.context is None]
    for row in selected:
        if not by_context or row.context is not None:
            lines.setdefault(_key(row, names), Line(row)).add(row)
    by_config: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines.values():
        by_config.setdefault(config_of(line.row), []).append(line)
    for row in general:
        partners = [line for line in by_config.get(config_of(row), []) if _agree(row, line.row)]
        for line in partners or [lines.setdefault(_key(row, names), Line(row))]:
            line.add(row)
    return _ordered(list(lines.values()))


def _agree(general: Row, row: Row) -> bool:
    """True if everything that the general row says holds for the other one as well."""
    settings = (name for name in IDENTITY if name not in KNOBS)
    return all(getattr(general, name) in (None, getattr(row, name)) for name in settings)


def _key(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in names)


def _ordered(lines: list[Line]) -> list[Line]:
    models = list(dict.fromkeys(line.row.model for line in lines))
    settings = list(dict.fromkeys(setting(line.row) for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    return sorted(
        lines,
        key=lambda line: (
            models.index(line.row.model),
            settings.index(setting(line.row)),
            -1 if line.row.context is None else line.row.context,
            not line.baseline,
            names.index(line.name),
            line.row.budget or 0,
        ),
    )


def setting(row: Row) -> tuple[Any, ...]:
    """What a method and its baseline have in common: SETTING and the architecture."""
    return (*_key(row, SETTING), row.kv_heads, layout_of(row))


def baseline_of(line: Line, lines: Iterable[Line], *, by_context: bool = True) -> Line | None:
    """The uncompressed line measured in the same setting (at the same context); None if there is none."""
    own, context = setting(line.row), line.row.context
    partners = [other for other in lines if other.baseline and setting(other.row) == own]
    partners = [other for other in partners if not by_context or other.row.context == context]
    wanted = _key(line.row, PREFERRED)
    shared = [sum(map(operator.eq, _key(other.row, PREFERRED), wanted)) for other in partners]
    return partners[shared.index(max(shared))] if partners else None


def measures_of(rows: Iterable[Row]) -> list[str]:
    """The measures in the rows: the known ones in reading order, then others as they come."""
    known = ("perplexity", "needle", "memory", "latency")
    found = dict.fromkeys(row.measure for row in rows if row.measure is not None)
    return [name for name in known if name in found] + [name for name in found if name not in known]
