"""One table for each measure: a line for each method in one setting, the baseline first, only columns that vary.

A `Table` holds each number as text and unrounded, so the terminal, the page and the files show the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvbench.report.compare.comparison import Line, baseline_of, decode_of, lines_of, measures_of
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.names import display_name
from kvbench.report.compare.origins import Origins, mixed_origins, runs_of
from kvbench.report.compare.texts import split_by_text
from kvbench.report.compare.time_ratios import missing_ratios, missing_slopes, with_time_ratios
from kvbench.report.compare.warnings import find_warnings
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence, verdict_record
from kvbench.report.tables.closing import closing_sentences
from kvbench.report.tables.columns import (
    caption_of,
    identity_columns,
    metric_columns,
    repeats_text,
    sampled_text,
    status_column,
    verdict_column,
)
from kvbench.report.tables.error_predictors import error_predictors_table
from kvbench.report.tables.headlines import COUNTS, RETIRED, SMALLER, WINDOWS, Recorded, headlines_of, reading_order
from kvbench.report.tables.method_pairs import method_pairs_table
from kvbench.report.tables.needle_tables import needle_tables
from kvbench.report.tables.needle_task_tables import needle_task_tables
from kvbench.report.tables.table import Table, for_terminal, shared_caption
from kvbench.report.tables.turn_tables import TURNS, turn_tables
from kvbench.results.headline import Headline
from kvbench.results.row import IDENTITY, MEMORY_PARTS, Row, rows_of

MOST_WARNINGS = 8
LOSSES = (
    Headline("ppl", "ppl", "fixed2", "low"),
    Headline("nll_minus_full", "ΔNLL", "signed", "low"),
    Headline("kl", "KL", "small", "low"),
    Headline("gap_closed_kl", "gap closed", "percent", "high"),
)
"""What the table of the texts shows."""


def build_tables(
    rows: Sequence[Row],
    recorded: Recorded | None = None,
    evidence: WindowEvidence = NO_EVIDENCE,
    origins: Origins = MappingProxyType({}),
) -> list[Table]:
    """All tables that the rows allow, in reading order.

    recorded: headlines from the configs of their run folders. evidence: windows that give the verdicts. origins: of the
    runs; a caption says where a table mixes versions of the code, machines or days.
    """
    tables: list[Table] = []
    rows = with_time_ratios(rows)
    for measure in measures_of(rows, reading_order(recorded)):
        if measure == "needle":
            lines = lines_of(rows, measure, by_context=False)
            columns, constants = metric_columns(lines, COUNTS)
            identity = [*identity_columns(lines, skip=("context",)), *status_column(lines)]
            origin = mixed_origins(lines, origins)
            caption = [*caption_of(lines, skip=("context",)), *constants, *repeats_text(lines), *origin]
            by_task = [replace(one, caption=[*one.caption, *origin]) for one in needle_task_tables(lines)]
            tables += [*needle_tables(lines, identity, caption, columns), *by_task]
            continue
        if measure == TURNS:
            lines = lines_of(rows, measure)
            tables += turn_tables(lines, mixed_origins(lines, origins))
            continue
        pooled, single = split_by_text([row for row in rows if row.measure == measure])
        lines = lines_of(pooled, measure)
        origin = mixed_origins(lines, origins)
        tables.append(_measure_table(measure, lines, recorded, evidence, origin))
        if by_text := lines_of(single, measure):
            tables.append(_by_text_table(measure, by_text, evidence, mixed_origins(by_text, origins)))
        if parts := _parts_table(measure, lines, origin):
            tables.append(parts)
        if measure == "error" and (predicting := error_predictors_table(lines, origin)):
            tables.append(predicting)
        if measure == "perplexity" and (pairs := method_pairs_table(evidence.families, origin)):
            tables.append(pairs)
    return tables


class TerminalTable:
    """A table for each measure, as wide as the console allows, the warnings, then the result in sentences.

    recorded, evidence, origins: as in `build_tables`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        recorded: Recorded | None = None,
        evidence: WindowEvidence = NO_EVIDENCE,
        origins: Origins = MappingProxyType({}),
    ) -> None:
        self.tables = [table for table in build_tables(rows, recorded, evidence, origins) if table.terminal]
        self.warnings = find_warnings(rows)
        self.closing = closing_sentences(groups_of(rows, evidence))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shared = shared_caption(self.tables)
        yield Text(" · ".join(shared), style="dim")
        for table in self.tables:
            yield Text()
            yield for_terminal(table, options.max_width, shared)
        if self.warnings:
            yield Text()
        for warning in self.warnings[:MOST_WARNINGS]:
            yield Text.assemble((f"{warning.kind}: ", "bold yellow"), warning.text)
        if len(self.warnings) > MOST_WARNINGS:
            more = len(self.warnings) - MOST_WARNINGS
            yield Text(f"... and {more} more warnings in the report", style="yellow")
        if self.closing:
            yield Text()
        for sentence in self.closing:
            yield Text(sentence)


def terminal_table(frame: pd.DataFrame) -> TerminalTable:
    """The tables for rich's Console.print. `frame` has the columns of `kvbench.results.row.Row`, as `load` returns."""
    return TerminalTable(rows_of(frame))


def _measure_table(
    measure: str, lines: list[Line], recorded: Recorded | None, evidence: WindowEvidence, origin: Sequence[str]
) -> Table:
    headlines = headlines_of(measure, lines, recorded)
    if SMALLER in headlines:
        _add_times_smaller(lines)
    _add_windows(lines, evidence)
    if WINDOWS not in headlines and any(line.get(WINDOWS.metric) for line in lines):
        headlines = (*headlines, WINDOWS)
    columns, constants = metric_columns(lines, headlines, evidence=evidence)
    verdicts = [evidence.verdict_of(line.get("nll_minus_full")) for line in lines]
    verdict, rule = verdict_column(verdicts)
    best = evidence.best_text() if any(verdicts) else []
    caption = [*caption_of(lines), *constants, *rule, *best, *missing_ratios(lines), *missing_slopes(lines)]
    caption += [*sampled_text(measure, lines, headlines), *repeats_text(lines), *origin]
    return Table(
        name=measure,
        title=measure.replace("_", " ").capitalize(),
        caption=caption,
        columns=(*identity_columns(lines, decode=measure == "perplexity"), *status_column(lines), *columns, *verdict),
        records=[r | verdict_record(found) for r, found in zip(_records(lines), verdicts, strict=True)],
        rows=[line.row for line in lines],
        page_only=(*rule, *best),
    )


def _by_text_table(measure: str, lines: list[Line], evidence: WindowEvidence, origin: Sequence[str]) -> Table:
    """The losses on each text of runs over several."""
    columns, constants = metric_columns(lines, LOSSES, evidence=evidence)
    verdicts = [evidence.verdict_of(line.get("nll_minus_full")) for line in lines]
    verdict, rule = verdict_column(verdicts)
    return Table(
        name=f"{measure}_by_text",
        title=f"{measure.replace('_', ' ').capitalize()} by text",
        caption=[*caption_of(lines, skip=("stride",)), *constants, *rule, *origin],
        columns=(*identity_columns(lines, skip=("stride",), decode=True), *columns, *verdict),
        records=[r | verdict_record(found) for r, found in zip(_records(lines), verdicts, strict=True)],
        terminal=False,
        rows=[line.row for line in lines],
    )


def _add_times_smaller(lines: Sequence[Line]) -> None:
    """Add to each line how many times smaller its cache is than its baseline's, slack included."""
    for line in lines:
        base = baseline_of(line, lines)
        full, held = base.get("held_bytes") if base is not None else None, line.get("held_bytes")
        if full is not None and held is not None and full.value and held.value:
            line.add(replace(held, metric=SMALLER.metric, value=full.value / held.value, unit="x"))


def _add_windows(lines: Sequence[Line], evidence: WindowEvidence) -> None:
    """Add the number of windows to lines of older versions, whose rows lack it: from the samples."""
    for line in lines:
        row = line.get("ppl")
        if row is not None and line.get(WINDOWS.metric) is None and (count := evidence.window_count(row)):
            line.add(replace(row, metric=WINDOWS.metric, value=float(count), unit="windows", low=None, high=None))


def _parts_table(measure: str, lines: list[Line], origin: Sequence[str]) -> Table | None:
    """Held bytes by part; None for a measure that has no parts."""
    found = [part for part in MEMORY_PARTS if any(line.get(f"held_bytes.{part}") for line in lines)]
    measured = [line for line in lines if any(line.get(f"held_bytes.{part}") for part in found)]
    if not found:
        return None
    headlines = [Headline(f"held_bytes.{part}", part, "bytes") for part in found]
    columns, _ = metric_columns(measured, [*headlines, Headline("held_bytes", "held", "bytes")])
    return Table(
        name=f"{measure}_parts",
        title=f"{measure.capitalize()} by part",
        caption=[*caption_of(measured), *origin],
        columns=(*identity_columns(measured), *columns),
        records=_records(measured, ["held_bytes", *(f"held_bytes.{part}" for part in found)]),
        terminal=False,
        rows=[line.row for line in measured],
    )


def _records(lines: Sequence[Line], metrics: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Unrounded numbers for CSV: identity, then every metric (or those named) with its interval and n."""
    records = []
    for line in lines:
        record: dict[str, Any] = {"method_shown": display_name(line.row)}
        record |= {name: getattr(line.row, name) for name in IDENTITY} | {"decode": decode_of(line.row)}
        for (metric, _, _), row in line.cells.items():
            if metric in RETIRED or (metrics is not None and metric not in metrics):
                continue
            record[metric] = row.value
            bounds = {"low": row.low, "high": row.high, "n": row.n}
            record |= {f"{metric}_{name}": value for name, value in bounds.items() if value is not None}
        record |= {"status": line.status, "runs": "; ".join(runs_of([line])) or None}
        records.append(record)
    return records
