"""Comparison tables: one line a method in one setting, only the columns that vary, `full` on top.

A `Table` holds each number as text for people and raw for CSV, so that the terminal, the page and the files
cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.report import needle, units
from kvbench.report.columns import Headline, caption_of, identity_columns, metric_columns, repeats_text, status_column
from kvbench.report.findings import find_all
from kvbench.report.lines import Line, lines_of, measures_of
from kvbench.report.names import IDENTITY
from kvbench.report.table import GAP, Table, fitting
from kvbench.results.row import Row, rows_of

COUNTS = (
    Headline("engaged", "engaged", units.plainly(units.percent), rank=1, folds=True),
    Headline("kept_tokens", "kept", units.plainly(units.count), rank=2, folds=True),
    Headline("positions_processed", "positions", units.plainly(units.count), rank=3, folds=True),
)
HEADLINES: dict[str, tuple[Headline, ...]] = {
    "perplexity": (
        Headline("ppl", "ppl", units.fixed(2), better="low"),
        Headline("nll_minus_full", "ΔNLL", units.plainly(units.signed), better="low"),
        Headline("kl", "KL", units.plainly(units.small), better="low"),
        Headline("top1", "top-1", units.plainly(units.percent), better="high"),
        Headline("top5", "top-5", units.plainly(units.percent), rank=2, better="high"),
        Headline("kl_reverse", "reverse KL", units.plainly(units.small), rank=2, better="low"),
        Headline("nll_minus_full_worst_decile", "worst tenth", units.plainly(units.signed), rank=2, better="low"),
        Headline("worse_share", "worse", units.plainly(units.percent), rank=2, better="low"),
    ),
    "memory": (
        Headline("held_bytes", "held", units.in_bytes, better="low", exact=True),
        Headline("dense_bytes", "dense", units.in_bytes, folds=True),
        Headline("analytic_bytes", "formula", units.in_bytes, rank=2),
        Headline("slack_bytes", "slack", units.in_bytes, rank=1),
        Headline("compressible_share", "compressible", units.plainly(units.percent), rank=1, folds=True),
        Headline("bits_per_value", "bits/value", units.fixed(2), better="low", exact=True),
        Headline("ratio", "ratio", units.fixed(2, "x"), better="high", exact=True),
        Headline("peak_prefill_bytes", "peak prefill", units.in_bytes),
        Headline("peak_decode_bytes", "peak decode", units.in_bytes),
    ),
    "latency": (
        Headline("prefill_ms", "prefill", units.plainly(units.significant, "ms"), better="low"),
        Headline("observe_ms", "observe", units.plainly(units.significant, "ms"), rank=1, better="low"),
        Headline("compress_ms", "compress", units.plainly(units.significant, "ms"), better="low"),
        Headline("ttft_ms", "TTFT", units.plainly(units.significant, "ms"), rank=1, better="low"),
        Headline("tpot_p50_ms", "TPOT p50", units.plainly(units.significant, "ms"), better="low"),
        Headline("tpot_p90_ms", "p90", units.plainly(units.significant, "ms"), better="low"),
        Headline("tpot_p99_ms", "p99", units.plainly(units.significant, "ms"), rank=1, better="low"),
        Headline("itl_p50_ms", "between tokens", units.plainly(units.significant, "ms"), rank=2, better="low"),
        Headline("tokens_per_s", "tokens/s", units.plainly(units.significant), rank=1, better="high"),
        Headline("slope_ms_per_1k", "slope", units.plainly(units.significant, "ms/1k")),
        Headline("bandwidth_share", "bandwidth", units.plainly(units.percent), rank=1, better="high"),
        Headline("bytes_per_s", "read a second", units.in_bytes, rank=2),
    ),
    "paging": (
        Headline("contiguous_bytes", "contiguous", units.in_bytes, exact=True),
        Headline("contiguous_waste_bytes", "wasted", units.in_bytes, rank=2, better="low", exact=True),
        Headline("paged_bytes", "paged", units.in_bytes, better="low", exact=True),
        Headline("paged_waste_bytes", "paged wasted", units.in_bytes, rank=2, better="low", exact=True),
        Headline("shared_bytes", "prefix shared", units.in_bytes, better="low", exact=True),
        Headline("saved_bytes", "saved", units.in_bytes, rank=1, better="high", exact=True),
        Headline("positions_saved", "positions saved", units.plainly(units.count), rank=1, better="high", exact=True),
        Headline("logit_difference", "logits differ", units.plainly(units.small), rank=3, better="low"),
    ),
}
MOST_WARNINGS = 8
PARTS = ("codes", "scales", "residual", "dense", "scores", "positions", "state")
TITLES = {"perplexity": "Perplexity", "needle": "Needle", "memory": "Memory", "latency": "Latency"}


def build_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables that the rows allow, in reading order."""
    tables: list[Table] = []
    for measure in measures_of(rows):
        if measure == "needle":
            lines = lines_of(rows, measure, by_context=False)
            columns, constants = metric_columns(lines, COUNTS)
            identity = [*identity_columns(lines, skip=("context",)), *status_column(lines)]
            caption = [*caption_of(lines, skip=("context",)), *constants, *repeats_text(lines)]
            tables += needle.needle_tables(lines, identity, caption, columns)
            continue
        lines = lines_of(rows, measure)
        tables.append(_measure_table(measure, lines))
        if measure == "memory" and (parts := _parts_table(lines)):
            tables.append(parts)
    return tables


class TerminalTable:
    """A table a measure, as wide as the console it is printed to allows, then the warnings."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.tables = [table for table in build_tables(rows) if table.terminal]
        self.findings = find_all(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shared = shared_caption(self.tables)
        yield Text(" · ".join(shared), style="dim")
        for table in self.tables:
            yield Text()
            yield for_terminal(table, options.max_width, shared)
        if self.findings:
            yield Text()
        for finding in self.findings[:MOST_WARNINGS]:
            yield Text.assemble((f"{finding.kind}: ", "bold yellow"), finding.text)
        if len(self.findings) > MOST_WARNINGS:
            more = len(self.findings) - MOST_WARNINGS
            yield Text(f"... and {more} more warnings in the report", style="yellow")


def terminal_table(frame: pd.DataFrame) -> TerminalTable:
    """What `python -m kvbench` prints at the end, to be given to rich's Console.print.

    `frame` has the columns of `kvbench.results.folder.Row`, as `load` and `frame_of` return it.
    """
    return TerminalTable(rows_of(frame))


def shared_caption(tables: Sequence[Table]) -> list[str]:
    """Caption parts that all tables have in common: said once, above them."""
    captions = [table.caption for table in tables]
    first = captions[0] if captions else []
    return [part for part in first if all(part in caption for caption in captions)]


def for_terminal(table: Table, width: int, shared: Sequence[str] = ()) -> RichTable:
    """The table with as many of its columns as fit; what all tables share is not repeated under it."""
    columns, dropped = fitting(table, width)
    own = [part for part in table.caption if part not in shared]
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
        # Names may break over lines, numbers never.
        justify: Literal["left", "right"] = "left" if column.left else "right"
        header, wraps = column.narrow_header(), column.left
        shown.add_column(header, vertical="bottom", justify=justify, no_wrap=not wraps, overflow="fold")
    for cells in zip(*(column.compact for column in columns), strict=True):
        shown.add_row(*map(Text, cells))
    return shown


def _measure_table(measure: str, lines: list[Line]) -> Table:
    headlines = HEADLINES.get(measure) or _unknown_headlines(lines)
    columns, constants = metric_columns(lines, (*headlines, *COUNTS))
    title = TITLES.get(measure, measure.replace("_", " ").capitalize())
    caption = [*caption_of(lines), *constants, *repeats_text(lines)]
    return Table(
        name=measure,
        title=title,
        caption=caption,
        columns=(*identity_columns(lines), *status_column(lines), *columns),
        records=_records(lines),
        rows=[line.row for line in lines],
    )


def _unknown_headlines(lines: list[Line]) -> tuple[Headline, ...]:
    # A measure this file does not know shows everything it yields; where that does not fit, the last ones give way.
    counted = {headline.metric for headline in COUNTS}
    metrics = dict.fromkeys(metric for line in lines for metric, _, _ in line.cells if metric not in counted)
    number = units.plainly(units.significant)
    return tuple(
        Headline(
            metric,
            metric.replace("_", " "),
            units.in_bytes if metric.endswith("_bytes") else number,
            rank=0 if i < 2 else 5 + i,
        )
        for i, metric in enumerate(metrics)
    )


def _parts_table(lines: list[Line]) -> Table | None:
    found = [part for part in PARTS if any(line.get(f"held_bytes.{part}") for line in lines)]
    measured = [line for line in lines if any(line.get(f"held_bytes.{part}") for part in found)]
    if not found:
        return None
    headlines = [Headline(f"held_bytes.{part}", part, units.in_bytes) for part in found]
    columns, _ = metric_columns(measured, [*headlines, Headline("held_bytes", "held", units.in_bytes)])
    return Table(
        name="memory_parts",
        title="Memory by part",
        caption=caption_of(measured),
        columns=(*identity_columns(measured), *columns),
        records=_records(measured, ["held_bytes", *(f"held_bytes.{part}" for part in found)]),
        terminal=False,
        rows=[line.row for line in measured],
    )


def _records(lines: Sequence[Line], metrics: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Raw numbers for CSV: identity, then every metric (or those named) with its interval and n."""
    records = []
    for line in lines:
        record: dict[str, Any] = {"method_shown": line.name}
        record |= {name: getattr(line.row, name) for name in IDENTITY}
        for (metric, _, _), row in line.cells.items():
            if metrics is not None and metric not in metrics:
                continue
            record[metric] = row.value
            bounds = {"low": row.low, "high": row.high, "n": row.n}
            record |= {f"{metric}_{name}": value for name, value in bounds.items() if value is not None}
        record["status"] = line.status
        records.append(record)
    return records
