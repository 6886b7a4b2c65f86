"""From the lines of a comparison to its columns: which ones to show, and what is said once in the caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.report import units
from kvbench.report.lines import Line, setting
from kvbench.report.names import IDENTITY, config_of, display_name, knob_text, varying_json, varying_knobs
from kvbench.report.table import Column, text_column
from kvbench.results.row import KINDS, KNOBS, Row

Chooser = Callable[[Sequence[float]], tuple[str, units.Format]]


@dataclass(frozen=True)
class Headline:
    """How one metric is shown: its header, how a column of values is formatted, when it gives way."""

    metric: str
    header: str
    choose: Chooser
    rank: int = 0  # 0 stays always; the highest rank is dropped first when a terminal is too narrow
    folds: bool = False  # goes into the caption when it is the same on every line
    better: Literal["low", "high"] | None = None  # which end is the good one
    exact: bool = False  # counted, not sampled: two values differ whenever they are not equal


def identity_columns(lines: Sequence[Line], skip: Sequence[str] = ()) -> list[Column]:
    """The method's name and whatever else tells the lines apart."""
    rows = [line.row for line in lines]
    columns = []
    models = {row.model for row in rows}
    if len(models) > 1:
        columns.append(text_column("model", "model", [short_model(row.model, models) for row in rows]))
    columns.append(text_column("method", "method", [display_name(row) for row in rows]))
    for knob in varying_knobs(rows):
        values = [getattr(row, knob) for row in rows]
        if knob == "knobs" or (knob in ("k_bits", "v_bits") and values == [row.bits for row in rows]):
            continue
        cells = [knob_text(knob, value) for value in values]
        columns.append(Column(knob, knob.replace("_", " "), cells, cells, numbers=_numbers(values)))
    extra = varying_json(rows)
    if any(extra.values()):
        columns.append(text_column("knobs", "knobs", [extra[config_of(row)] for row in rows]))
    return columns + _setting_columns(lines, columns, skip)


def _setting_columns(lines: Sequence[Line], shown: Sequence[Column], skip: Sequence[str]) -> list[Column]:
    """Settings that vary. One that follows from the columns before it (a kernel from the store) may go."""
    columns = []
    told = list(zip(*(column.full for column in shown), strict=True))
    for name in sorted(IDENTITY, key=lambda name: name != "context"):
        values = [getattr(line.row, name) for line in lines]
        if name in (*KNOBS, "model", *skip) or len(_distinct(values)) < 2:
            continue
        cells = [_setting_text(name, value) for value in values]
        finer = [(*before, cell) for before, cell in zip(told, cells, strict=True)]
        rank = 0 if len(set(finer)) > len(set(told)) else 4
        told = finer
        left = KINDS[name] is str
        columns.append(Column(name, name.replace("_", " "), cells, cells, left, rank, _numbers(values)))
    return columns


def caption_of(lines: Sequence[Line], skip: Sequence[str] = ()) -> list[str]:
    """Everything that is the same on all lines: `budget 256`, `dtype float32`, ..."""
    parts: list[str] = []
    for name in IDENTITY:
        values = _distinct(getattr(line.row, name) for line in lines)
        if len(values) != 1 or name in ("method", "store", "knobs", "bits", "k_bits", "v_bits", *skip):
            continue
        if name == "converted":
            parts += ["converted"] if values[0] else []
        else:
            parts.append(f"{name.replace('_', ' ')} {_setting_text(name, values[0])}")
    return parts


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(value for value in values if value is not None))


def _setting_text(name: str, value: Any) -> str:
    if name in ("context", "residual", "window") and value is not None:
        return f"{value:,}"
    return short_model(value) if name == "model" else knob_text(name, value)


def short_model(model: str | None, among: Iterable[str | None] = ()) -> str:
    """`HuggingFaceTB/SmolLM2-135M` -> `SmolLM2-135M`, or as much of the name as tells it from the others `among`."""
    parts = (model or "?").rstrip("/").split("/")
    others = [f"/{other}".rstrip("/") for other in among if other and other != model]
    tails = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next((tail for tail in tails if not any(other.endswith(f"/{tail}") for other in others)), "/".join(parts))


def heads_text(heads: int | None) -> str:
    """`9 KV heads`"""
    return f"{heads if heads is not None else '?'} KV head{'' if heads == 1 else 's'}"


def status_column(lines: Sequence[Line]) -> list[Column]:
    """A column for what failed, only if something did."""
    statuses = [line.status for line in lines]
    return [] if set(statuses) <= {"ok"} else [text_column("status", "status", statuses)]


def metric_columns(lines: Sequence[Line], headlines: Iterable[Headline]) -> tuple[list[Column], list[str]]:
    """Columns of the metrics that were measured, and caption parts for what is the same on every line."""
    columns, constants = [], []
    for headline in headlines:
        found = [line.get(headline.metric) for line in lines]
        values = [value for line in lines for value in line.values(headline.metric)]
        if not any(found):
            continue
        unit, form = headline.choose(values)
        header = f"{headline.header} {unit}".strip()
        if headline.folds and len(lines) > 1 and len(values) == len(lines) and len(set(values)) == 1:
            constants.append(f"{headline.header} {form(values[0])} {unit}".strip())
            continue
        full = [_cell(line, headline.metric, form, compact=False) for line in lines]
        compact = [_cell(line, headline.metric, form, compact=True) for line in lines]
        numbers = [line.value(headline.metric) for line in lines]
        best = best_of(lines, headline)
        columns.append(Column(headline.metric, header, full, compact, False, headline.rank, numbers, best))
    return columns, constants


def best_of(lines: Sequence[Line], headline: Headline) -> frozenset[int]:
    """In each setting the line, other than the baseline, that beats all others of its setting beyond the intervals.

    A number without an interval beats nothing, unless it was counted.
    """
    if headline.better is None:
        return frozenset()
    groups: dict[tuple[Any, ...], list[tuple[float, float, int]]] = {}
    for index, line in enumerate(lines):
        row = line.get(headline.metric)
        if row is not None and row.value is not None and not line.baseline:
            groups.setdefault((*setting(line.row), line.row.context), []).append((*_reach(row, headline), index))
    found = set()
    for members in groups.values():
        # By the far end of the interval: only the least of these can lie beyond all others.
        (_, far, first), *others = sorted(members, key=lambda member: member[1])
        if others and far < min(near for near, _, _ in others):
            found.add(first)
    return frozenset(found)


def _reach(row: Row, headline: Headline) -> tuple[float, float]:
    """The interval of a number, turned so that low is good."""
    value = row.value or 0.0
    unknown = (-math.inf, math.inf)
    bounds = unknown if row.low is None or row.high is None else (row.low, row.high)
    low, high = (value, value) if headline.exact else bounds
    return (low, high) if headline.better == "low" else (-high, -low)


def _numbers(values: Iterable[Any]) -> list[float | None]:
    """What to sort a column by; nothing where it holds words."""
    known = list(values)
    if any(isinstance(value, str | bool) for value in known):
        return []
    return [None if value is None else float(value) for value in known]


def _cell(line: Line, metric: str, form: units.Format, *, compact: bool) -> str:
    row, values = line.get(metric), line.values(metric)
    if len(values) > 1:  # a line over several contexts, as the needle's
        return f"{form(values[0])}–{form(values[-1])}"
    if row is None:
        return "–"
    if row.value is None:
        return "nan"
    form = units.within(form, row.low, row.high)
    text = form(row.value)
    if row.low is None or row.high is None:
        return text
    if compact:
        half = form((row.high - row.low) / 2).lstrip("+")
        return f"{text} ±{half.rstrip('0').rstrip('.') if '.' in half else half}"
    return units.interval(text, form(row.low), form(row.high))


def repeats_text(lines: Sequence[Line]) -> list[str]:
    """Says so when a later run measured again what an earlier one had; the later number is the one shown."""
    repeats = sum(line.repeats for line in lines)
    return [f"{repeats} numbers measured again by a later run, the latest shown"] if repeats else []
