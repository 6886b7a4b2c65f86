"""The table at the head of a report: every method once, with its quality, memory and speed side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.report import units
from kvbench.report.candidates import Candidate, Group
from kvbench.report.columns import Headline, identity_columns, metric_columns, short_model
from kvbench.report.lines import Cell, Line, measures_of
from kvbench.report.names import IDENTITY, layout_of, weights_of
from kvbench.report.table import Column, Table, text_column
from kvbench.results.row import Row

# What belongs to one measure and says nothing about a line over all of them.
OF_ONE_MEASURE = (
    "context",
    "batch",
    "kernel",
    "threads",
    "protocol",
    "question",
    "revision",
    "seed",
    "dataset",
    "stride",
    "bos",
    "tokenizer",
)
QUALITY = (
    Headline("nll_minus_full", "ΔNLL", units.plainly(units.signed), better="low"),
    Headline("kl", "KL", units.plainly(units.small), better="low"),
    Headline("top1", "top-1", units.plainly(units.percent), better="high"),
    Headline("hit_rate", "needles", units.plainly(units.whole_percent), better="high"),
)
HELD = Headline("held_bytes", "held", units.in_bytes, better="low", exact=True)
GAIN = (
    Headline("times_less", "less", units.fixed(1, "x"), better="high", exact=True),
    Headline("tpot_p50_ms", "TPOT", units.plainly(units.significant, "ms"), better="low"),
)
HEADLINES = (*QUALITY, HELD, *GAIN)
# Where architectures stand in one table. Sizes come first, which all of them have; what is compared with a full cache
# is compared with each one's own.
ACROSS = (
    HELD,
    Headline("bytes_per_token", "a token", units.in_bytes),
    Headline("bytes_per_token_layer", "and a layer", units.in_bytes),
    *GAIN,
    Headline("ppl", "ppl", units.fixed(2)),
    *QUALITY,
)
PLACES = {"perplexity": "quality after", "memory": "memory at", "latency": "TPOT at"}


def overview(groups: Sequence[Group]) -> Table | None:
    """One line a method and setting; None where fewer than two measures or two methods make a comparison.

    Where models, KV heads or MLA layouts differ, each line also says what a token costs and where its weights are from.
    """
    lines = [_line(member, group) for group in groups for member in _members(group)]
    across = len({(group.row.model, group.row.kv_heads, layout_of(group.row)) for group in groups}) > 1
    columns, _ = metric_columns(lines, ACROSS if across else HEADLINES)
    if len(lines) < 2 or not columns:
        return None
    common, places = _places(groups)
    identity = identity_columns(lines, skip=(*OF_ONE_MEASURE, *(["converted"] if across else [])))
    caption = [f"model {short_model(groups[0].row.model)}"] if len({group.row.model for group in groups}) == 1 else []
    if across:
        identity.append(text_column("weights", "weights", [weights_of(line.row) for line in lines]))
    caption += common
    if any(places):
        identity.append(text_column("measured", "measured", places))
    if len({row.tokenizer for group in groups if (row := _quality(group)) is not None}) > 1:
        caption.append("perplexities of different tokenizers cannot be held against each other")
    return Table(
        "overview",
        "All methods",
        caption,
        (*identity, *_told(columns, lines)),
        _records(lines),
        terminal=False,
        rows=[replace(line.row, measure=",".join(measures_of(line.cells.values()))) for line in lines],
    )


def _members(group: Group) -> list[Candidate]:
    return [*([group.baseline] if group.baseline is not None else []), *group.members]


def _line(member: Candidate, group: Group) -> Line:
    """The candidate as a line whose numbers stand at no context in particular."""
    numbers = dict(member.numbers)
    if member.held is not None:
        held = replace(numbers["held_bytes"], value=member.held)
        numbers["held_bytes"] = held
        if (ratio := group.ratio(member)) is not None:
            numbers["times_less"] = replace(held, metric="times_less", value=ratio, unit="x")
    cells: dict[Cell, Row] = {(metric, None, None): row for metric, row in numbers.items()}
    return Line(replace(member.row, context=None), cells)


def _places(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """Where numbers were taken: what holds for all groups that have them, and of each line what is its group's own."""
    told = [_place(group) for group in groups]
    common = {
        measure: text
        for place in told
        for measure, text in place.items()
        if all(other.get(measure, text) == text for other in told)
    }
    own = ["; ".join(text for measure, text in place.items() if measure not in common) for place in told]
    return list(common.values()), [text for group, text in zip(groups, own, strict=True) for _ in _members(group)]


def _place(group: Group) -> dict[str, str]:
    told = {measure: f"{PLACES[measure]} {context:,} tokens" for measure, context in group.contexts.items()}
    return told | ({"needle": f"needles in {group.lengths[-1]:,}"} if group.lengths else {})


def _quality(group: Group) -> Row | None:
    """The row of the full cache's perplexity."""
    return None if group.baseline is None else group.baseline.numbers.get("ppl")


def _told(columns: Sequence[Column], lines: Sequence[Line]) -> list[Column]:
    """Without the columns that only the baseline has."""
    others = [index for index, line in enumerate(lines) if not line.baseline]
    return [column for column in columns if any(column.numbers[index] is not None for index in others)]


def _records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        known = {name: getattr(line.row, name) for name in IDENTITY if name not in OF_ONE_MEASURE}
        record: dict[str, Any] = {"method_shown": line.name, **known}
        for (metric, _, _), row in line.cells.items():
            record |= {metric: row.value, **_bounds(metric, row)}
        records.append(record)
    return records


def _bounds(metric: str, row: Row) -> dict[str, float]:
    found = {f"{metric}_low": row.low, f"{metric}_high": row.high}
    return {name: value for name, value in found.items() if value is not None}
