"""A measure that the report has never heard of is shown by the headlines that its run folder records."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvbench.report.compare.declared import shipped_headlines
from kvbench.report.page.write import write_report
from kvbench.report.tables.headlines import COUNTS, better_of, headlines_of, reading_order
from kvbench.report.tables.measure_tables import TerminalTable, build_tables
from kvbench.results.folder import RunFolder
from kvbench.results.headline import Headline
from kvbench.results.recorded_config import read_config, recorded_headlines
from kvbench.results.row import Row
from tests.shared.rows import BASE

ENTROPY = (
    Headline("entropy_nats", "entropy", "signed", better="low"),
    Headline("flat_share", "flat", "percent", rank=1),
)


def entropy_rows() -> list[Row]:
    base = replace(BASE, measure="entropy", context=64)
    methods = [replace(base, method="full", store="dense"), replace(base, method="h2o", store="dense", budget=32)]
    return [
        replace(row, metric=metric, value=value + 0.125 * index, unit=unit)
        for index, row in enumerate(methods)
        for metric, value, unit in (("entropy_nats", 2.5, "nats"), ("flat_share", 0.25, "share"))
    ]


def test_recorded_headlines_make_table_page_terminal_and_csv(tmp_path: Path) -> None:
    config = {"headlines": {"entropy": [one.record() for one in ENTROPY]}}
    run = RunFolder.create(tmp_path / "sweep", "test", config, {"command": "python -m kvbench measure=[entropy]"})
    run.add(entropy_rows())
    run.finish("ok")
    page = write_report([run.path], tmp_path / "report")
    text = page.read_text()
    assert ">Entropy<" in text and ">flat<" in text and "+2.62" in text and "37.5%" in text
    assert "| h2o    |   +2.62 | 37.5% |" in (page.parent / "report.md").read_text()
    records = list(csv.DictReader((page.parent / "entropy.csv").open()))
    assert [float(record["entropy_nats"]) for record in records] == [2.5, 2.625]
    recorded = recorded_headlines([read_config(run.path)])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(TerminalTable(entropy_rows(), recorded))
    shown = console.export_text()
    assert "Entropy" in shown and "flat" in shown and "+2.62" in shown
    assert better_of(recorded)["entropy_nats"] == "low" and reading_order(recorded)[-1] == "entropy"


def test_without_recorded_headlines_every_metric_is_shown_in_its_unit() -> None:
    (table,) = build_tables(entropy_rows())
    assert [column.header for column in table.columns] == ["method", "entropy nats", "flat share"]
    assert table.columns[-1].full == ["25.0%", "37.5%"]


def test_recorded_headlines_replace_the_declared_ones() -> None:
    recorded = {"perplexity": (Headline("ppl", "mine"),)}
    assert headlines_of("perplexity", [], recorded) == (*recorded["perplexity"], *COUNTS)
    assert headlines_of("latency", [], recorded) == shipped_headlines("latency") != ()


def test_an_unknown_format_is_shown_with_three_digits() -> None:
    recorded = {"entropy": (Headline("entropy_nats", "entropy", "roman"),)}  # type: ignore[arg-type]
    (table,) = build_tables(entropy_rows(), recorded)
    assert table.columns[-1].full == ["2.50", "2.62"]
