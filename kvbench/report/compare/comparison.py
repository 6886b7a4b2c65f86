"""Which rows may be compared, which one is the baseline, and rows gathered into the lines of a comparison."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.results.row import IDENTITY, KNOBS, Row, flags_of

Config = tuple[Any, ...]
"""Values of KNOBS: one method with all its knobs."""
Cell = tuple[str, int | None, float | None]
"""Metric, context, depth."""
MODEL_AND_DEVICE = ("model", "kv_heads", "converted", "dtype", "device")
ONE_MEASURE = ("dataset", "question", "batch")
"""Columns that only some measures fill, so they agree within one measure and not across measures."""
COMPARED = (*MODEL_AND_DEVICE, *ONE_MEASURE)
FUTURE_METHODS = ("hindsight",)
"""Keep rules that see the future. Samples carry no flags, so they are known by name as well."""
PREFERRED = ("revision", "protocol", "kernel", "threads", "seed")
"""Of several baselines the one that agrees in most of these columns is taken."""


def comparison_key(row: Row, *, across_measures: bool = False) -> tuple[Any, ...]:
    """Equal for rows whose numbers may be compared, at the same context: the columns COMPARED and the MLA layout.

    across_measures: leaves out ONE_MEASURE, for numbers of different measures side by side.
    """
    return (*_values(row, MODEL_AND_DEVICE if across_measures else COMPARED), layout_of(row))


def config_of(row: Row) -> Config:
    """The method with all its knobs."""
    return _values(row, KNOBS)


def is_baseline(row: Row) -> bool:
    """True for the full cache in its own precision, its prompt read in one piece, with which all are compared."""
    return row.method == "full" and row.store in (None, "full", "dense") and row.prefill_chunk is None


def sees_future(row: Row) -> bool:
    """The method ranks tokens by later tokens' attention: a ceiling to compare with, never a choice."""
    return "sees_future" in flags_of(row) or row.method in FUTURE_METHODS


def layout_of(row: Row) -> str | None:
    """What is cached of multi-head latent attention: absorbed, latent or expand; None for a model without it."""
    layout = other_knobs(row).get("mla")
    return None if layout is None else str(layout)


def other_knobs(row: Row) -> dict[str, Any]:
    """The knobs without a column of their own; text that is no JSON object stands under `knobs`."""
    return dict(_parsed(row.knobs)) if row.knobs else {}


@functools.lru_cache(maxsize=4096)
def _parsed(knobs: str) -> Mapping[str, Any]:
    try:
        content = json.loads(knobs)
    except ValueError:
        content = knobs
    return content if isinstance(content, dict) else {"knobs": content}


def decode_of(row: Row) -> str | None:
    """append: decoded tokens are added to the budget; evict: the budget holds while decoding; None: no such knob."""
    decode = other_knobs(row).get("decode")
    return None if decode is None else str(decode)


def weights_of(row: Row) -> str:
    """trained, repeated, pooled or random. A row that does not say counts as trained, a converted one as pooled."""
    return row.weights or ("pooled" if row.converted else "trained")


@dataclass
class Line:
    """One method with its knobs in one setting, with all its numbers."""

    row: Row  # any of its rows: all agree in IDENTITY, except at times in the context
    cells: dict[Cell, Row] = field(default_factory=dict)
    curves: dict[tuple[str, int | None], dict[int, Row]] = field(default_factory=dict)  # (metric, context): by position
    failures: list[Row] = field(default_factory=list)
    repeats: int = 0  # older numbers that a later run replaced

    @property
    def baseline(self) -> bool:
        return is_baseline(self.row)

    def get(self, metric: str) -> Row | None:
        """The row of a metric, the last one of several; None if it was not measured."""
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
        """Keep a row. Of two rows for one cell the later one stays; a failure never replaces a number."""
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
        """`ok`, or the status of the last failure if nothing was measured."""
        return self.failures[-1].status if self.failures and not self.cells else "ok"


def lines_of(rows: Iterable[Row], measure: str, *, by_context: bool = True) -> list[Line]:
    """The lines of one measure: in each setting the baseline first, then the methods in the order of their rows.

    The budgets of a method stand together, in ascending order.

    With `by_context` each context length is a line of its own. A row without context (a slope over contexts) is added
    to every line of its method whose settings agree with it.
    """
    lines: dict[tuple[Any, ...], Line] = {}
    selected = [row for row in rows if row.measure == measure and row.method is not None]
    names = tuple(name for name in IDENTITY if by_context or name != "context")
    general = [row for row in selected if by_context and row.context is None]
    for row in selected:
        if not by_context or row.context is not None:
            lines.setdefault(_values(row, names), Line(row)).add(row)
    by_config: dict[Config, list[Line]] = {}
    for line in lines.values():
        by_config.setdefault(config_of(line.row), []).append(line)
    for row in general:
        partners = [line for line in by_config.get(config_of(row), []) if _agree(row, line.row)]
        for line in partners or [lines.setdefault(_values(row, names), Line(row))]:
            line.add(row)
    return _ordered(list(lines.values()))


def _agree(general: Row, row: Row) -> bool:
    """True if every setting that the general row has is the other row's setting too."""
    settings = (name for name in IDENTITY if name not in KNOBS)
    return all(getattr(general, name) in (None, getattr(row, name)) for name in settings)


def _values(row: Row, names: tuple[str, ...]) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _getter(names)(row)
    return values


@functools.cache
def _getter(names: tuple[str, ...]) -> operator.attrgetter[Any]:
    return operator.attrgetter(*names)


def _ordered(lines: list[Line]) -> list[Line]:
    models = _places(line.row.model for line in lines)
    keys = _places(comparison_key(line.row) for line in lines)
    methods = _places((line.row.method, line.row.store) for line in lines)
    return sorted(
        lines,
        key=lambda line: (
            models[line.row.model],
            keys[comparison_key(line.row)],
            -1 if line.row.context is None else line.row.context,
            not line.baseline,
            methods[line.row.method, line.row.store],
            line.row.budget or 0,
        ),
    )


def _places(values: Iterable[Any]) -> dict[Any, int]:
    """The place of each distinct value in the order of first appearance."""
    return {value: place for place, value in enumerate(dict.fromkeys(values))}


def baseline_of(line: Line, lines: Iterable[Line], *, by_context: bool = True) -> Line | None:
    """The baseline that `line` may be compared with (at the same context); None if it was not measured."""
    own, context = comparison_key(line.row), line.row.context
    partners = [other for other in lines if other.baseline and comparison_key(other.row) == own]
    partners = [other for other in partners if not by_context or other.row.context == context]
    wanted = _values(line.row, PREFERRED)
    shared = [sum(map(operator.eq, _values(other.row, PREFERRED), wanted)) for other in partners]
    return partners[shared.index(max(shared))] if partners else None


def measures_of(rows: Iterable[Row], first: Iterable[str] = ()) -> list[str]:
    """The measures in the rows: those of `first` in its order, then the others in the order of their rows."""
    found = dict.fromkeys(row.measure for row in rows if row.measure is not None)
    known = list(first)
    return [name for name in known if name in found] + [name for name in found if name not in known]
