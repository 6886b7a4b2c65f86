"""Columns of a table from the lines of a comparison; what all lines share goes into the caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import Line, comparison_key, config_of, decode_of, sees_future
from kvbench.report.compare.names import display_name, knob_text, short_model, varying_knobs, varying_other_knobs
from kvbench.report.compare.time_ratios import SLOPE
from kvbench.report.compare.warnings import GAPS
from kvbench.report.compare.window_verdicts import HOW, NO_EVIDENCE, WindowEvidence, verdict_cell
from kvbench.report.tables.table import Column, text_column
from kvbench.results.headline import Format, Headline
from kvbench.results.paired import Verdict
from kvbench.results.row import IDENTITY, KINDS, KNOBS, Row, flags_of

FORMATS: dict[Format, Callable[[Sequence[float]], tuple[str, number_text.Format]]] = {
    "fixed2": number_text.fixed(2),
    "significant": number_text.plainly(number_text.significant),
    "percent": number_text.plainly(number_text.percent),
    "signed": number_text.plainly(number_text.signed),
    "small": number_text.plainly(number_text.small),
    "count": number_text.plainly(number_text.count),
    "bytes": number_text.in_bytes,
    "ms": number_text.plainly(number_text.significant, "ms"),
    "ms_per_1k": number_text.plainly(number_text.significant, "ms/1k"),
    "x": number_text.fixed(2, "x"),
}
"""For each format of a headline: from the values of a column its unit and how to write one value."""
TESTED = ("ppl", "nll_minus_full")
"""Metrics whose best methods are marked by paired tests over windows."""
LARGEST_BATCH = "largest_batch"
"""Protocol of a throughput at the largest batch that fits: each method has its own."""
TIME_UNITS = ("ms", "ms/1k", "s", "tokens/s", "bytes/s")
BATCH_UNITS = (*TIME_UNITS, "bytes")
"""Units of metrics that depend on the batch size. Quality does not: there a batch is the windows run at a time."""


def identity_columns(lines: Sequence[Line], skip: Sequence[str] = (), *, decode: bool = False) -> list[Column]:
    """The method's name, and the knobs and settings that differ between lines.

    decode: with a column that says which rules append decoded tokens to the budget and which evict.
    """
    rows = [line.row for line in lines]
    columns = []
    models = {row.model for row in rows}
    if len(models) > 1:
        columns.append(text_column("model", "model", [short_model(row.model, models) for row in rows], whole=True))
    columns.append(text_column("method", "method", [display_name(row) for row in rows], whole=True))
    for knob in varying_knobs(rows):
        values = [getattr(row, knob) for row in rows]
        if knob == "knobs" or (knob in ("k_bits", "v_bits") and values == [row.bits for row in rows]):
            continue
        cells = [knob_text(knob, value) for value in values]
        columns.append(Column(knob, knob.replace("_", " "), cells, cells, numbers=_numbers(values)))
    modes = [decode_of(row) for row in rows] if decode else []
    if any(modes):
        columns.append(text_column("decode", "decode", [mode or "–" for mode in modes]))
    extra = varying_other_knobs(rows, skip=("decode",) if any(modes) else ())
    if any(extra.values()):
        columns.append(text_column("knobs", "knobs", [extra[config_of(row)] for row in rows]))
    return columns + _setting_columns(lines, columns, skip)


def _setting_columns(lines: Sequence[Line], shown: Sequence[Column], skip: Sequence[str]) -> list[Column]:
    """Settings that differ. One that the columns before it determine (a kernel by its store) may be left out."""
    columns = []
    lines_so_far = list(zip(*(column.full for column in shown), strict=True))
    for name in sorted(IDENTITY, key=lambda name: name != "context"):
        values = [getattr(line.row, name) for line in lines]
        if name in (*KNOBS, "model", *skip) or len(_distinct(values)) < 2:
            continue
        cells = [_setting_text(name, value) for value in values]
        finer = [(*before, cell) for before, cell in zip(lines_so_far, cells, strict=True)]
        rank = 0 if len(set(finer)) > len(set(lines_so_far)) else 4
        lines_so_far = finer
        left = KINDS[name] is str
        columns.append(Column(name, name.replace("_", " "), cells, cells, left, rank, _numbers(values)))
    return columns


def caption_of(lines: Sequence[Line], skip: Sequence[str] = ()) -> list[str]:
    """What is the same on all lines: `budget 256`, `dtype float32`, ..."""
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


def status_column(lines: Sequence[Line]) -> list[Column]:
    """A column of statuses, only if something failed."""
    statuses = [line.status for line in lines]
    return [] if set(statuses) <= {"ok"} else [text_column("status", "status", statuses)]


def verdict_column(verdicts: Sequence[Verdict | None]) -> tuple[list[Column], list[str]]:
    """A column of verdicts against the full cache, and their rule for the caption; both empty without a verdict."""
    if not any(verdicts):
        return [], []
    full, compact = [verdict_cell(one) for one in verdicts], [verdict_cell(one, short=True) for one in verdicts]
    return [Column("verdict", "verdict", full, compact, left=True, rank=1)], [HOW]


def metric_columns(
    lines: Sequence[Line],
    headlines: Iterable[Headline],
    *,
    across_measures: bool = False,
    evidence: WindowEvidence = NO_EVIDENCE,
) -> tuple[list[Column], list[str]]:
    """Columns of the metrics that were measured, and caption parts for values that are the same on every line.

    evidence: windows from which the best perplexities are marked.
    """
    columns, constants = [], []
    for headline in headlines:
        found = [line.get(headline.metric) for line in lines]
        values = [value for line in lines for value in line.values(headline.metric)]
        if not any(found):
            continue
        unit, form = FORMATS.get(headline.format, FORMATS["significant"])(values)
        header = f"{headline.title} {unit}".strip()
        if headline.folds and len(lines) > 1 and len(values) == len(lines) and len(set(values)) == 1:
            constants.append(f"{headline.title} {form(values[0])} {unit}".strip())
            continue
        full = [_cell(line, headline.metric, form, compact=False) for line in lines]
        compact = [_cell(line, headline.metric, form, compact=True) for line in lines]
        numbers = [line.value(headline.metric) for line in lines]
        best = best_of(lines, headline, across_measures=across_measures)
        if headline.metric in TESTED:
            best |= {index for index, row in enumerate(found) if row is not None and evidence.is_best(row)}
        column = Column(headline.metric, header, full, compact, False, headline.rank, numbers, best)
        columns.append(replace(column, better=headline.better))
    return columns, constants


def best_of(lines: Sequence[Line], headline: Headline, *, across_measures: bool = False) -> frozenset[int]:
    """In each setting the line, other than the baseline, whose upper bound is below every other lower bound.

    Bounds are turned where high is better. A number without an interval is never best, unless it is exact. Metrics of
    perplexity are not marked here, because their intervals cover the scored windows only. Methods that see the future
    do not compete.
    across_measures: lines over several measures are compared within one model and device.
    """
    if headline.better is None:
        return frozenset()
    groups: dict[tuple[Any, ...], list[tuple[float, float, int]]] = {}
    for index, line in enumerate(lines):
        row = line.get(headline.metric)
        sampled = row is not None and row.measure == "perplexity" and not headline.exact
        competes = not line.baseline and not sees_future(line.row)
        if row is not None and row.value is not None and competes and not sampled:
            setting = _setting(line, row, across_measures=across_measures)
            groups.setdefault(setting, []).append((*_bounds(row, headline), index))
    found = set()
    for members in groups.values():
        (_, upper, first), *others = sorted(members, key=lambda member: member[1])
        if others and upper < min(lower for lower, _, _ in others):
            found.add(first)
    return frozenset(found)


def _setting(line: Line, row: Row, *, across_measures: bool) -> tuple[Any, ...]:
    """Lines with equal settings compete. Over several measures bytes are those of one sequence."""
    source = row if across_measures else line.row
    depends = row.measure == "latency" or row.unit in (TIME_UNITS if across_measures else BATCH_UNITS)
    # Of the largest batch that fits, the batch is part of the result.
    batch = source.batch if depends and row.protocol != LARGEST_BATCH else None
    return (*comparison_key(source, across_measures=True), source.context, source.dataset, source.question, batch)


def _bounds(row: Row, headline: Headline) -> tuple[float, float]:
    """Lower and upper bound of a number, turned so that low is good."""
    value = row.value or 0.0
    unknown = (-math.inf, math.inf)
    bounds = unknown if row.low is None or row.high is None else (row.low, row.high)
    low, high = (value, value) if headline.exact else bounds
    return (low, high) if headline.better == "low" else (-high, -low)


def _numbers(values: Iterable[Any]) -> list[float | None]:
    """What to sort a column by; empty where it holds words."""
    known = list(values)
    if any(isinstance(value, str | bool) for value in known):
        return []
    return [None if value is None else float(value) for value in known]


def _cell(line: Line, metric: str, form: number_text.Format, *, compact: bool) -> str:
    row, values = line.get(metric), line.values(metric)
    if len(values) > 1:  # over several contexts, as in the needle tables
        return f"{form(values[0])}–{form(values[-1])}"
    if row is None:
        return "–"
    if row.value is None and (metric in GAPS or "not_computed" in flags_of(row)):  # for the reason in its note
        return "–"
    if row.value is None or not math.isfinite(row.value):  # rows that were read from a file have None for both
        return "not finite"
    form = number_text.within(form, row.low, row.high)
    text = form(row.value)
    if row.low is None or row.high is None or row.low == row.high == row.value:
        return text
    if compact:
        half = form((row.high - row.low) / 2).lstrip("+").rstrip("x")
        return f"{text} ±{half.rstrip('0').rstrip('.') if '.' in half else half}"
    return number_text.interval(text, form(row.low), form(row.high))


def sampled_text(measure: str, lines: Sequence[Line], headlines: Iterable[Headline]) -> list[str]:
    """The caption part that says on how many values an interval rests. Perplexity and needles have columns for it."""
    if measure in ("perplexity", "needle"):
        return []
    metrics = [one.metric for one in headlines if one.metric != SLOPE]  # its values are contexts
    rows = [row for metric in metrics for line in lines if (row := line.get(metric)) is not None]
    counts = {row.n for row in rows if row.n is not None and row.low is not None}
    if not counts:
        return []
    least, most = min(counts), max(counts)
    return [
        f"an interval rests on {least:,} values" if least == most else f"intervals rest on {least:,} to {most:,} values"
    ]


def repeats_text(lines: Sequence[Line]) -> list[str]:
    """The caption part that counts numbers of an earlier run that a later run replaced."""
    repeats = sum(line.repeats for line in lines)
    return [f"{repeats} numbers measured again by a later run, the latest shown"] if repeats else []
