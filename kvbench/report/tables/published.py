"""Published numbers beside measured ones: the table made from a preset's `published:` node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvbench.errors import UserError
from kvbench.report.compare.names import knob_text
from kvbench.report.tables.table import Column, Table, for_terminal, text_column
from kvbench.results.row import COLUMNS, Row

EXAMPLE = "published={source: ..., settings: {...}, numbers: [{method: h2o, metric: ppl, value: 5.4}]}"


@dataclass(frozen=True)
class Number:
    """A published number. of: the columns of the row to compare it with, `metric` among them; `knobs` as JSON."""

    value: float
    of: dict[str, Any]

    @property
    def label(self) -> str:
        """`streaming_llm sinks=4`"""
        others = {key: value for key, value in self.of.items() if key not in ("method", "metric", "store", "knobs")}
        knobs = [f"{key}={value}" for key, value in (others | json.loads(self.of.get("knobs", "{}"))).items()]
        return " ".join([str(self.of.get("method", "")), *knobs]).strip()


@dataclass(frozen=True)
class Published:
    """Numbers of one source. settings: columns of a row as published; the table names those that differ."""

    source: str
    settings: dict[str, Any]
    numbers: list[Number]


def published_of(node: Any) -> Published | None:
    """The `published:` node of a config; None where there is none. Raises UserError for one that cannot be used."""
    if node is None:
        return None
    numbers = node.get("numbers") if isinstance(node, Mapping) else None
    if not isinstance(numbers, Sequence) or not numbers or not all(isinstance(one, Mapping) for one in numbers):
        raise UserError(f"published={node} lists no numbers; write {EXAMPLE}")
    settings = dict(node.get("settings") or {})
    for one in numbers:
        unknown = sorted({*one, *settings} - {*COLUMNS})
        if unknown or "metric" not in one or isinstance(one.get("value"), bool | str | None):
            what = f"{unknown[0]} is no column of a row" if unknown else "metric and value (a number) are needed"
            raise UserError(f"published: {dict(one)}: {what}; write {EXAMPLE}")
    columns = [{key: _column(value) for key, value in one.items() if key != "value"} for one in numbers]
    return Published(
        str(node.get("source", "")),
        settings,
        [Number(float(one["value"]), of) for one, of in zip(numbers, columns, strict=True)],
    )


def _column(value: Any) -> Any:
    """A value as a row holds it: knobs without a column of their own are JSON."""
    return json.dumps(dict(value), sort_keys=True) if isinstance(value, Mapping) else value


def print_published(published: Published | None, rows: Sequence[Row]) -> None:
    """Print the table at the end of a run, if its preset names published numbers."""
    if published is not None and (table := published_table(published, rows)) is not None:
        console = Console()
        console.print()
        console.print(for_terminal(table, console.width))


def published_tables(configs: Iterable[Mapping[str, Any]], rows: Sequence[Row]) -> list[Table]:
    """A table for each different `published:` node of the configs of run folders."""
    nodes: list[Any] = []
    for config in configs:
        node = config.get("published")
        if node is not None and node not in nodes:
            nodes.append(node)
    names = (f"published_{index}" if index else "published" for index in range(len(nodes)))
    tables = [
        published_table(found, rows, name)
        for node, name in zip(nodes, names, strict=False)
        if (found := published_of(node)) is not None
    ]
    return [table for table in tables if table is not None]


def published_table(published: Published, rows: Sequence[Row], name: str = "published") -> Table | None:
    """One line for each number: published, measured, difference; None if none of them was measured."""
    found = [closest(number, published.settings, rows) for number in published.numbers]
    if not any(found):
        return None
    measured = [None if row is None else row.value for row in found]
    values = [number.value for number in published.numbers]
    off = [None if ours is None else ours - value for ours, value in zip(measured, values, strict=True)]
    caption = [published.source]
    if other := sorted({text for row in found if row is not None for text in differing(row, published.settings)}):
        caption.append(f"not the published setting (in brackets): {', '.join(other)}")
    return Table(
        name,
        "Beside published numbers",
        caption,
        (
            text_column("method", "method", [number.label for number in published.numbers], whole=True),
            text_column("metric", "metric", [str(number.of["metric"]) for number in published.numbers]),
            _numbers("published", values),
            _numbers("measured", measured),
            _numbers("difference", off, sign="+"),
        ),
        [
            {
                **number.of,
                "published": number.value,
                "measured": ours,
                "difference": difference,
                "low": getattr(row, "low", None),
                "high": getattr(row, "high", None),
                "source": published.source,
            }
            for number, ours, difference, row in zip(published.numbers, measured, off, found, strict=True)
        ],
        rows=[row or Row(method=number.of.get("method")) for number, row in zip(published.numbers, found, strict=True)],
    )


def closest(number: Number, settings: Mapping[str, Any], rows: Sequence[Row]) -> Row | None:
    """The measured row of a published number: the one with most settings in common, of equals the latest."""
    fitting = [
        row
        for row in rows
        if row.value is not None and all(getattr(row, key) == value for key, value in number.of.items())
    ]
    ranked = [(len(differing(row, settings)), -index) for index, row in enumerate(fitting)]
    return fitting[-min(ranked)[1]] if ranked else None


def differing(row: Row, settings: Mapping[str, Any]) -> list[str]:
    """`n 64 (65536)`: each setting that differs, with the published one in brackets."""
    return [
        f"{key} {knob_text(key, getattr(row, key))} ({value})"
        for key, value in settings.items()
        if getattr(row, key) != value
    ]


def _numbers(key: str, values: Sequence[float | None], sign: str = "") -> Column:
    cells = ["–" if value is None else f"{value:{sign},.{_decimals(value)}f}" for value in values]
    return Column(key, key, cells, cells, numbers=values)


def _decimals(value: float) -> int:
    """Decimals as in published tables: fewer where the number is large."""
    return 4 if abs(value) < 1 else 2 if abs(value) < 1000 else 0
