"""Tables with one line for each method over all measures: the overview that heads a report, and the traits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, Cell, Line, layout_of, measures_of, weights_of
from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.names import display_name, short_model
from kvbench.report.compare.origins import Origins, mixed_origins, runs_of
from kvbench.report.compare.time_ratios import missing_ratios
from kvbench.report.compare.verdicts import WEIGHTS_WORDS, loss_text, times_text
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence, verdict_record
from kvbench.report.tables.columns import identity_columns, metric_columns, verdict_column
from kvbench.report.tables.headlines import (
    KEPT,
    KEPT_WHILE_SCORED,
    SIXTEEN_BITS,
    SMALLER,
    Recorded,
    reading_order,
    with_one_kept,
)
from kvbench.report.tables.table import Column, Table, text_column
from kvbench.results.headline import Headline
from kvbench.results.row import IDENTITY, KNOBS, Row

SETTINGS_OF_A_MEASURE = tuple(name for name in IDENTITY if name not in (*MODEL_AND_DEVICE, "arch", *KNOBS))
"""Columns that say how one measure was taken, so they say nothing about a line over all measures."""
QUALITY = (
    Headline("nll_minus_full", "ΔNLL", "signed", better="low"),
    Headline("kl", "KL", "small", better="low"),
    Headline("gap_closed_kl", "gap closed", "percent", better="high"),
    Headline("top1", "top-1", "percent", better="high", rank=1),
    Headline("hit_rate", "needles", "percent", better="high"),
)
HELD = Headline("held_bytes", "held", "bytes", better="low", exact=True)
TPOT = Headline("tpot_p50_ms", "TPOT", "ms", better="low")
TPOT_TO_FULL = Headline("tpot_to_full", "TPOT / full's", "x", better="low")
KEPT_TOKENS = (KEPT_WHILE_SCORED, KEPT)
HEADLINES = (*QUALITY, *KEPT_TOKENS, HELD, SMALLER, SIXTEEN_BITS, TPOT, TPOT_TO_FULL)
# With several architectures in one table sizes come first, because every architecture has them. x smaller and ΔNLL
# compare with the full cache of the same architecture.
ARCHITECTURES = (
    HELD,
    Headline("bytes_per_token", "a token", "bytes"),
    Headline("bytes_per_token_layer", "and a layer", "bytes"),
    SMALLER,
    SIXTEEN_BITS,
    TPOT,
    TPOT_TO_FULL,
    Headline("ppl", "ppl", "fixed2"),
    *QUALITY,
)
PLACES = {"perplexity": "quality after", "bytes": "bytes at", "memory": "bytes a token at", "latency": "TPOT at"}
YES_NO = {True: "yes", False: "no", None: "–"}
MOST_GROUPS = 2
"""Groups that the table of traits shows."""


def overview(
    groups: Sequence[Group],
    recorded: Recorded | None = None,
    evidence: WindowEvidence = NO_EVIDENCE,
    origins: Origins = MappingProxyType({}),
) -> Table | None:
    """One line for each method and group; None with fewer than two lines or without a number.

    Where models, KV heads or MLA layouts differ, each line also shows bytes a token and where its weights come from.
    origins: of the runs; the caption says where the table mixes versions of the code, machines or days.
    """
    lines = [_line(member, group) for group in groups for member in group.everyone]
    several = len({(group.row.model, group.row.kv_heads, layout_of(group.row)) for group in groups}) > 1
    chosen = ARCHITECTURES if several else with_one_kept(HEADLINES, lines)
    columns, _ = metric_columns(lines, chosen, across_measures=True, evidence=evidence)
    if len(lines) < 2 or not columns:
        return None
    common, places = _places(groups, {"memory"} if not several else set())
    skip = (*SETTINGS_OF_A_MEASURE, *(["converted"] if several else []))
    identity = identity_columns(lines, skip, decode=True)
    caption = [f"model {short_model(groups[0].row.model)}"] if len({group.row.model for group in groups}) == 1 else []
    if several:
        words = [WEIGHTS_WORDS[weights_of(line.row)] for line in lines]
        identity.append(text_column("weights", "weights", words))
    caption += _scored_text(groups)
    verdicts = [member.verdict for group in groups for member in group.everyone]
    verdict, rule = verdict_column(verdicts)
    caption += [*common, *rule, *(evidence.best_text() if any(verdicts) else [])]
    if any(places):
        identity.append(text_column("measured", "measured", places))
    if len({row.tokenizer for group in groups if (row := _perplexity(group)) is not None}) > 1:
        caption.append("perplexities of different tokenizers cannot be compared")
    caption += [*missing_ratios(lines), *mixed_origins(lines, origins)]
    order = reading_order(recorded)
    return Table(
        "overview",
        "All methods",
        caption,
        (*identity, *_of_methods(columns, lines), *verdict),
        [record | verdict_record(found) for record, found in zip(_records(lines), verdicts, strict=True)],
        terminal=False,
        rows=[replace(line.row, measure=",".join(measures_of(line.cells.values(), order))) for line in lines],
    )


def _scored_text(groups: Sequence[Group]) -> list[str]:
    """For the caption: texts and windows of the perplexity, where the groups share them."""
    rows = [row for group in groups for one in group.everyone if (row := one.numbers.get("nll_minus_full")) is not None]
    datasets = {row.dataset for row in rows} - {None}
    counts = {one.verdict.n for group in groups for one in group.members if one.verdict is not None}
    texts = [f"data {next(iter(datasets))}"] if len(datasets) == 1 else []
    if counts:
        least, most = min(counts), max(counts)
        texts.append(f"{least}{f' to {most}' if most > least else ''} windows")
    return texts


def _line(member: MethodNumbers, group: Group) -> Line:
    """The method as a line without a context, because its numbers were taken at several."""
    numbers = {metric: row for metric, row in member.numbers.items() if metric != HELD.metric}
    if member.scored is not None and member.held is not None:
        held = replace(member.scored, metric=HELD.metric, value=member.held)
        numbers[HELD.metric] = held
        if (times := group.times_smaller(member)) is not None:
            numbers[SMALLER.metric] = replace(held, metric=SMALLER.metric, value=times, unit="x")
        if (times := group.times_smaller_16(member)) is not None:
            numbers.setdefault(SIXTEEN_BITS.metric, replace(held, metric=SIXTEEN_BITS.metric, value=times, unit="x"))
    cells: dict[Cell, Row] = {(metric, None, None): row for metric, row in numbers.items()}
    return Line(replace(member.row, context=None), cells)


def _places(groups: Sequence[Group], hidden: Collection[str]) -> tuple[list[str], list[str]]:
    """Contexts of the numbers: those that all groups share, and for each line those that only its group has.

    hidden: measures without a column.
    """
    known = [{name: text for name, text in _place(group).items() if name not in hidden} for group in groups]
    common = {
        measure: text
        for place in known
        for measure, text in place.items()
        if all(other.get(measure, text) == text for other in known)
    }
    own = ["; ".join(text for measure, text in place.items() if measure not in common) for place in known]
    return list(common.values()), [text for group, text in zip(groups, own, strict=True) for _ in group.everyone]


def _place(group: Group) -> dict[str, str]:
    found = {measure: f"{PLACES[measure]} {context:,} tokens" for measure, context in group.contexts.items()}
    return found | ({"needle": f"needles in {group.lengths[-1]:,}"} if group.lengths else {})


def _perplexity(group: Group) -> Row | None:
    """The row of the full cache's perplexity."""
    return None if group.baseline is None else group.baseline.numbers.get("ppl")


def _of_methods(columns: Sequence[Column], lines: Sequence[Line]) -> list[Column]:
    """The columns in which a line other than the baseline has a number."""
    others = [index for index, line in enumerate(lines) if not line.baseline]
    return [column for column in columns if any(column.numbers[index] is not None for index in others)]


def _records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        known = {name: getattr(line.row, name) for name in IDENTITY if name not in SETTINGS_OF_A_MEASURE}
        record: dict[str, Any] = {"method_shown": display_name(line.row), **known}
        for (metric, _, _), row in line.cells.items():
            record |= {metric: row.value, **_bounds(metric, row)}
        record["runs"] = "; ".join(runs_of([line])) or None
        records.append(record)
    return records


def _bounds(metric: str, row: Row) -> Mapping[str, float]:
    found = {f"{metric}_low": row.low, f"{metric}_high": row.high}
    return {name: value for name, value in found.items() if value is not None}


def traits_table(groups: Sequence[Group]) -> Table | None:
    """What each method of the first groups loses by design, beside the measured saving; None without a method."""
    pairs = [(member, group) for group in groups[:MOST_GROUPS] for member in group.members]
    if not pairs:
        return None
    texts = [_traits(member, group) for member, group in pairs]
    columns = tuple(
        Column(key, key, cells, cells, left=key not in ("x smaller", "at a ΔNLL of"), whole=key == "method")
        for key in texts[0]
        for cells in [[text[key] for text in texts]]
    )
    return Table("traits", "Traits", [], columns, [_traits_record(*pair) for pair in pairs], terminal=False)


def _traits_record(member: MethodNumbers, group: Group) -> dict[str, Any]:
    """The line of the CSV: words as they are, numbers unrounded."""
    loss = member.numbers.get("nll_minus_full")
    text = _traits(member, group)
    record: dict[str, Any] = {name: text[name] for name in ("method", "shrinks", "retraining", "history")}
    record |= {"size_bounded": text["size bounded"], "typical_saving": text["typical saving"]}
    record[SMALLER.metric] = group.times_smaller(member)
    return record | ({} if loss is None else {"nll_minus_full": loss.value, **_bounds("nll_minus_full", loss)})


def _traits(member: MethodNumbers, group: Group) -> dict[str, str]:
    traits, times = member.traits, group.times_smaller_16(member)
    loss = member.numbers.get("nll_minus_full")
    return {
        "method": member.label,
        "shrinks": traits.shrinks or "–",
        "retraining": {True: "needed", False: "no", None: "–"}[traits.retraining],
        "history": traits.history or "–",
        "size bounded": YES_NO[traits.bounded],
        "typical saving": traits.typical or "–",
        "x smaller than 16-bit": "–" if times is None else times_text(times),
        "at a ΔNLL of": "–" if loss is None else loss_text(loss),
    }
