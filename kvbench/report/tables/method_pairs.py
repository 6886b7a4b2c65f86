"""Every pair of methods that was compared on the same windows, with its difference and corrected p-value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import MODEL_AND_DEVICE, decode_of
from kvbench.report.compare.method_families import MethodFamily
from kvbench.report.compare.names import knob_text, short_model
from kvbench.report.tables.table import Column, Table, text_column
from kvbench.results.row import Row

SETTINGS = (*MODEL_AND_DEVICE, "context", "protocol")
HOW = (
    "ΔNLL: mean of the method minus the other on the same windows, nats; p: paired t test over windows, corrected for "
    "skewness and by Holm for the pairs of one budget and decode mode; below 0.05 the two can be told apart"
)


def method_pairs_table(families: Sequence[MethodFamily], origin: Sequence[str] = ()) -> Table | None:
    """One line for each pair of a family, the pairs with the smallest p first; None without a family.

    origin: caption parts that say where the rows come from.
    """
    if not families:
        return None
    lines = sorted(_lines(families), key=lambda line: line["p"])
    columns = [
        text_column(name, name.replace("_", " "), [_text(name, line) for line in lines], whole=name == "model")
        for name in SETTINGS
        if len({line[name] for line in lines}) > 1
    ]
    columns += [
        Column(
            "budget",
            "budget",
            budgets := [knob_text("budget", line["budget"]) for line in lines],
            budgets,
            numbers=[line["budget"] for line in lines],
        ),
        text_column("decode", "decode", [line["decode"] or "–" for line in lines]),
        text_column("method", "method", [line["method"] for line in lines], whole=True),
        text_column("other", "other method", [line["other"] for line in lines], whole=True),
        _numbers("difference", "ΔNLL", lines, number_text.signed),
        _numbers("p", "p", lines, number_text.small),
        text_column("verdict", "verdict", [_verdict(line) for line in lines]),
    ]
    windows = dict.fromkeys(f"{line['windows']} windows" for line in lines)
    return Table(
        "method_pairs", "Methods compared pairwise", [HOW, *windows, *origin], tuple(columns), lines, terminal=False
    )


def _lines(families: Sequence[MethodFamily]) -> Iterator[dict[str, Any]]:
    for family in families:
        for one in range(len(family.rows)):
            for other in range(one + 1, len(family.rows)):
                # The better method of a pair is named first.
                lower = family.matrix.difference[one, other] <= 0
                yield _line(family, *((one, other) if lower else (other, one)))


def _line(family: MethodFamily, one: int, other: int) -> dict[str, Any]:
    row: Row = family.rows[one]
    return {
        **{name: getattr(row, name) for name in SETTINGS},
        "budget": row.budget,
        "decode": decode_of(row),
        "method": family.labels[one],
        "other": family.labels[other],
        "difference": float(family.matrix.difference[one, other]),
        "p": float(family.matrix.p[one, other]),
        "differ": family.differ(one, other),
        "windows": family.matrix.n,
    }


def _text(name: str, line: dict[str, Any]) -> str:
    return short_model(line[name]) if name == "model" else knob_text(name, line[name])


def _numbers(key: str, header: str, lines: Sequence[dict[str, Any]], form: number_text.Format) -> Column:
    cells = [form(line[key]) for line in lines]
    return Column(key, header, cells, cells, numbers=[line[key] for line in lines])


def _verdict(line: dict[str, Any]) -> str:
    return f"{line['method']} is better" if line["differ"] else "cannot be told apart"
