"""What stands on the default page and what on the second one, `details`."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.figures.all_figures import MOST_MAIN, DrawnFigure
from kvbench.report.tables.table import Table

DETAILS = "details"
"""Stem of the second page's files."""
MOST_TABLES = 6
"""Tables on the default page."""
FURTHER = ("memory_parts", "method_pairs", "needle_grid")
"""Tables for readers who look for them: they go to the second page first."""


def split_figures(figures: Sequence[DrawnFigure]) -> tuple[list[DrawnFigure], list[DrawnFigure]]:
    """Figures of the default page, at most MOST_MAIN, and all others."""
    first = [figure for figure in figures if figure.main][:MOST_MAIN]
    return first, [figure for figure in figures if figure not in first]


def split_tables(tables: Sequence[Table]) -> tuple[list[Table], list[Table]]:
    """Tables of the default page, at most MOST_TABLES and in their order, and all others."""
    order = sorted(tables, key=lambda table: table.name.startswith(FURTHER))
    names = {id(table) for table in order[:MOST_TABLES] if not table.name.startswith(FURTHER)}
    return [table for table in tables if id(table) in names], [table for table in tables if id(table) not in names]
