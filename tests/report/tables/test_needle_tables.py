"""Needle tables count every hit once."""

from __future__ import annotations

from kvbench.report.tables.measure_tables import build_tables
from tests.report.synthetic import column, keys, table
from tests.shared.rows import rows


def test_needle_counts_hits_once_although_a_row_pools_the_depths() -> None:
    found = table(rows(), "needle")
    assert column(found, "hits")[0] == "24/24"
    grid = table(rows(), "needle_grid")
    assert [key for key in keys(grid) if key.startswith("depth")] == ["depth_0.1", "depth_0.5", "depth_0.9"]
    assert column(grid, "rate")[0] == "100% [70%, 100%]"
    single = [found.name for found in build_tables(rows(lengths=[1024], measures=["needle"]))]
    assert single == ["needle"]
