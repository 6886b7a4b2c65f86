"""report.html and details.html: each holds its figures and tables itself and opens without a network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from kvbench.report.compare.comparison import is_baseline
from kvbench.report.compare.method_kinds import FAMILIES, family_of
from kvbench.report.compare.names import knob_text
from kvbench.report.compare.warnings import ReportWarning
from kvbench.report.figures.all_figures import DrawnFigure
from kvbench.report.figures.style import COLOURS
from kvbench.report.page.commands import RecordedRun, command_of
from kvbench.report.page.content import Report
from kvbench.report.page.latex import to_latex
from kvbench.report.page.markdown import NO_WARNINGS, READING, machine_text
from kvbench.report.page.pages import split_figures, split_tables
from kvbench.report.page.table_files import to_csv, to_markdown
from kvbench.report.tables.table import INTERVAL, Column, Table

OPEN_LINES = 3
"""With at most as many warnings of one kind, their list is open."""
MOST_LINES = 200
"""Warnings of one kind that the page holds."""
LARGEST_FILE = 300_000
"""Bytes of a table's file that the page itself holds for saving; a larger file is linked."""


@dataclass(frozen=True)
class PageCell:
    """One cell of a table. key: what the column is sorted by."""

    text: str
    interval: str
    key: float | str
    best: bool


@dataclass(frozen=True)
class PageLine:
    """One line of a table. command: measures it again. family, budget: what filters ask for, None if not known."""

    cells: list[PageCell]
    baseline: bool
    command: str | None
    family: str | None
    budget: str | None


def report_html(report: Report, folder: Path) -> str:
    """The default page. folder: where the figures were drawn."""
    first, further = split_tables(report.tables)
    figures, more = split_figures(report.figures)
    tables = [_shown(table, report.runs) for table in first]
    more_tables = len(further) + (report.traits is not None)
    return _template("report.html.j2").render(
        report=report,
        warnings=_by_kind(report.warnings),
        no_warnings=NO_WARNINGS,
        reading=" ".join(READING.split()),
        head=[table for table in tables if table["name"] == "overview"],
        tables=[table for table in tables if table["name"] != "overview"],
        lead=[_embedded(figure, folder) for figure in figures if figure.lead],
        figures=[_embedded(figure, folder) for figure in figures if not figure.lead],
        further=_count(len(more), "more figure") if more else "",
        further_titles=", ".join(dict.fromkeys(figure.title for figure in more)),
        further_tables=_count(more_tables, "more table") if more_tables else "",
        details=has_details(report),
        filters=_filters(first),
        hues=COLOURS,
        commands=list(dict.fromkeys(run.command for run in report.runs.values() if run.command)),
        machines=_machines(report.provenance),
    )


def has_details(report: Report) -> bool:
    """There is something for the second page."""
    return bool(split_figures(report.figures)[1] or split_tables(report.tables)[1] or report.traits is not None)


def details_html(report: Report, folder: Path) -> str:
    """The second page: all figures and tables that the default page leaves out."""
    _, tables = split_tables(report.tables)
    _, figures = split_figures(report.figures)
    return _template("details.html.j2").render(
        report=report,
        reading=" ".join(READING.split()),
        tables=[_shown(table, report.runs) for table in tables],
        traits=_shown(report.traits, report.runs) if report.traits is not None else None,
        figures=[_embedded(figure, folder) for figure in figures],
        filters=_filters(tables),
        hues=COLOURS,
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _filters(tables: Sequence[Table]) -> dict[str, Any]:
    """What a reader may choose: families by key and name, and budgets as they are written in the tables."""
    rows = [row for table in tables for row in table.rows if not is_baseline(row)]
    families = {family_of(row) for row in rows}
    budgets = sorted({row.budget for row in rows if row.budget is not None})
    return {
        "families": {key: words for key, words in FAMILIES.items() if key in families},
        "budgets": [knob_text("budget", budget) for budget in budgets],
        "unlimited": any(row.budget is None for row in rows),
    }


def changes_html(table: Table | None, title: str, sentence: str) -> str:
    """The page of a comparison of two sweeps. table None: nothing changed."""
    shown = _shown(table, {}) if table is not None else None
    return _template("changes.html.j2").render(table=shown, title=title, sentence=sentence)


def tables_html(tables: Sequence[Table], title: str, sentence: str) -> str:
    """A page of tables, each under its title, and a sentence below them."""
    shown = [_shown(table, {}) for table in tables]
    return _template("board.html.j2").render(tables=shown, title=title, sentence=sentence)


def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("kvbench.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _by_kind(warnings: Iterable[ReportWarning]) -> list[dict[str, Any]]:
    kinds: dict[str, list[str]] = {}
    for warning in warnings:
        kinds.setdefault(warning.kind, []).append(warning.text)
    return [
        {"kind": kind, "texts": texts[:MOST_LINES], "count": len(texts), "open": len(texts) <= OPEN_LINES}
        for kind, texts in kinds.items()
    ]


def _shown(table: Table, runs: Mapping[str, RecordedRun]) -> dict[str, Any]:
    lines = []
    for index in range(table.height):
        row = table.rows[index] if table.rows else None
        recorded = runs.get(row.run or "") if row is not None else None
        command = command_of(row, recorded) if row is not None and recorded is not None else None
        cells = [_cell(column, index) for column in table.columns]
        family = family_of(row) if row is not None else None
        budget = knob_text("budget", row.budget) if row is not None else None
        lines.append(PageLine(cells, row is not None and is_baseline(row), command, family, budget))
    return {
        "name": table.name,
        "title": table.title,
        "caption": " · ".join(table.caption),
        "columns": table.columns,
        "lines": lines,
        "commands": any(line.command for line in lines),
        "files": _files(table),
    }


def _cell(column: Column, index: int) -> PageCell:
    text = column.full[index]
    number = column.numbers[index] if column.numbers else None
    found = INTERVAL.match(text)
    value, interval = found.groups() if found and not column.left else (text, "")
    key = number if number is not None else "" if column.numbers else text
    return PageCell(value, interval, key, index in column.best)


def _files(table: Table) -> list[tuple[str, str, str]]:
    """What can be saved: the format, the file name, and the content as a data address (or the file beside the page)."""
    found = []
    for word, ending, kind, content in (
        ("CSV", "csv", "text/csv", to_csv(table)),
        ("LaTeX", "tex", "text/plain", to_latex(table)),
        ("Markdown", "md", "text/plain", to_markdown(table)),
    ):
        name = f"{table.name}.{ending}"
        address = _address(content.encode(), f"{kind};charset=utf-8") if len(content) < LARGEST_FILE else name
        found.append((word, name, address))
    return found


def _embedded(figure: DrawnFigure, folder: Path) -> dict[str, Any]:
    image = (folder / figure.file).read_bytes()
    paper = figure.file.removesuffix(".png") + ".pdf"
    pdf = (folder / paper).read_bytes()
    width, height = (int.from_bytes(image[start : start + 4], "big") for start in (16, 20))  # PNG's first chunk
    return {
        "name": figure.file.removesuffix(".png"),
        "title": figure.title,
        "caption": figure.caption,
        "alt": figure.alt,
        "image": _address(image, "image/png"),
        "paper": _address(pdf, "application/pdf"),
        "paper_name": paper,
        "width": width // 2,
        "height": height // 2,
    }


def _address(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _machines(provenance: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Code and machine, each once, with the runs that it made."""
    alike: dict[str, list[str]] = {}
    for run, known in provenance.items():
        alike.setdefault(machine_text({**known, "time_utc": ""}).rstrip("; "), []).append(run)
    return list(alike.items())
