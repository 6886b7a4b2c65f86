"""Tables in a terminal: names whole, numbers whole or named as left out."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvbench.report.tables.measure_tables import build_tables, terminal_table
from kvbench.report.tables.table import columns_that_fit, for_terminal
from kvbench.results.row import Row, frame_of
from tests.report.synthetic import OOM, sweep
from tests.shared.rows import BASE, rows

STORED = [
    replace(BASE, method="full", store="dense"),
    replace(BASE, method="full", store="paged", bits=4, k_bits=4, v_bits=4, knobs='{"inner": "int4"}'),
]


UNLISTED = [
    replace(base, measure="speed_of_light", metric=f"metric_{n}_bytes", unit="bytes", value=1e6 + n)
    for n in range(9)
    for base in STORED
]


PAGING = [
    replace(base, measure="paging", metric=metric, unit="bytes", value=1e6 + n)
    for base in STORED
    for n, metric in enumerate(
        (
            "contiguous_bytes",
            "contiguous_waste_bytes",
            "paged_bytes",
            "paged_waste_bytes",
            "shared_bytes",
            "saved_bytes",
            "positions_saved",
        )
    )
]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize(
    "made", [rows(), sweep(), [*rows(), OOM], rows(contexts=[2048], lengths=[1024]), UNLISTED, PAGING]
)
def test_terminal_table_fits_without_cutting_a_name_or_a_number(made: list[Row], width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table(frame_of(made)))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = set(text.split())
    for found in build_tables(made):
        fitting, left_out = columns_that_fit(found, width)
        assert {shown.key for shown in fitting} >= {shown.key for shown in found.columns if shown.whole}
        for shown in fitting if found.terminal else ():
            if shown.whole or not shown.left:
                assert {word for cell in shown.compact for word in cell.split()} <= words
        if found.terminal:
            assert {word for header in left_out for word in header.split()} <= {word.rstrip(",") for word in words}


def test_names_keep_their_width_and_numbers_are_left_out_from_the_right() -> None:
    made = rows([(name, "dense", {"budget": 64.0}, 23.0, 0.5) for name in ("full", "a_keep_rule_with_a_long_name")])
    (found,) = build_tables([row for row in made if row.measure == "latency" and row.context in (None, 512)])
    fitting, left_out = columns_that_fit(found, 50)
    assert fitting[0].key == "method" and fitting[0].whole
    shown = [column.header for column in found.columns if column in fitting]
    assert left_out and shown[0] == "method" and found.columns[-1].header in left_out
    console = Console(width=50, record=True, file=io.StringIO())
    console.print(for_terminal(found, 50))
    assert "a_keep_rule_with_a_long_name " in console.export_text()


def test_terminal_table_of_nothing_and_of_failures_only() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_table(frame_of([])))
    console.print(terminal_table(frame_of([OOM])))
    assert "tried 2 GiB" in console.export_text()
