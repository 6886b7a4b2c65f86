"""report.html: one file that opens without a network, with everything in it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from kvbench.report.candidates import setting_of
from kvbench.report.commands import Recorded, command_of
from kvbench.report.findings import Finding
from kvbench.report.markdown import NO_WARNINGS, READING, machine
from kvbench.report.plots import Plot
from kvbench.report.table import INTERVAL, Column, Table, to_csv, to_latex, to_markdown
from kvbench.report.verdict import Advice, advised

if TYPE_CHECKING:
    from kvbench.report.page import Report

OPEN_LINES = 3  # warnings of one kind that stand open
MOST_LINES = 200  # warnings of one kind that are written out
LARGEST_FILE = 300_000  # bytes of a table that the page carries for saving; larger ones stay beside it


@dataclass(frozen=True)
class Cell:
    """One cell of a table: the number, its interval, what to sort it by."""

    text: str
    interval: str
    key: float | str
    best: bool


@dataclass(frozen=True)
class Line:
    """One line of a table. command: what measures it again."""

    cells: list[Cell]
    baseline: bool
    command: str | None


def to_html(report: Report, folder: Path) -> str:
    """The page; plots are read from `folder`, where they were drawn."""
    template = _template("report.html.j2")
    tables = [_shown(table, report.runs) for table in report.tables]
    return template.render(
        report=report,
        warnings=_by_kind(report.findings),
        no_warnings=NO_WARNINGS,
        reading=" ".join(READING.split()),
        settings=_by_setting(report.advice),
        head=[table for table in tables if table["name"] == "overview"],
        tables=[table for table in tables if table["name"] != "overview"],
        traits=_shown(report.traits, report.runs) if report.traits is not None else None,
        plots=[_drawn(plot, folder) for plot in report.plots],
        commands=list(dict.fromkeys(run.command for run in report.runs.values() if run.command)),
        machines=_machines(report.provenance),
    )


def against_html(table: Table | None, title: str, sentence: str) -> str:
    """The page of a comparison of two sweeps; table None: nothing moved."""
    shown = _shown(table, {}) if table is not None else None
    return _template("against.html.j2").render(table=shown, title=title, sentence=sentence)


def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("kvbench.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _by_kind(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    kinds: dict[str, list[str]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding.text)
    return [
        {"kind": kind, "texts": texts[:MOST_LINES], "count": len(texts), "open": len(texts) <= OPEN_LINES}
        for kind, texts in kinds.items()
    ]


def _by_setting(advice: Sequence[Advice]) -> list[tuple[str, list[Advice]]]:
    """Advice under the name of its setting, which is empty where there is only one."""
    groups = advised(advice)
    settings: dict[str, list[Advice]] = {}
    for one in advice:
        several = len(groups) > 1 and one.key != "architecture"
        settings.setdefault(setting_of(one.group, groups) if several else "", []).append(one)
    return sorted(settings.items(), key=lambda item: item[0] == "")


def _shown(table: Table, runs: Mapping[str, Recorded]) -> dict[str, Any]:
    lines = []
    for index in range(table.height):
        row = table.rows[index] if table.rows else None
        recorded = runs.get(row.run or "") if row is not None else None
        command = command_of(row, recorded) if row is not None and recorded is not None else None
        cells = [_cell(column, index) for column in table.columns]
        lines.append(Line(cells, row is not None and row.method == "full" and row.store in (None, "dense"), command))
    return {
        "name": table.name,
        "title": table.title,
        "caption": " · ".join(table.caption),
        "columns": table.columns,
        "lines": lines,
        "commands": any(line.command for line in lines),
        "files": _files(table),
    }


def _cell(column: Column, index: int) -> Cell:
    text = column.full[index]
    number = column.numbers[index] if column.numbers else None
    found = INTERVAL.match(text)
    value, interval = found.groups() if found and not column.left else (text, "")
    key = number if number is not None else "" if column.numbers else text
    return Cell(value, interval, key, index in column.best)


def _files(table: Table) -> list[tuple[str, str, str]]:
    """What can be saved: the word, the file name, and the content as a data address (or the file beside the page)."""
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


def _drawn(plot: Plot, folder: Path) -> dict[str, Any]:
    image = (folder / plot.file).read_bytes()
    paper = plot.file.removesuffix(".png") + ".pdf"
    pdf = (folder / paper).read_bytes()
    width, height = (int.from_bytes(image[start : start + 4], "big") for start in (16, 20))  # PNG's first chunk
    return {
        "title": plot.title,
        "caption": plot.caption,
        "alt": plot.alt,
        "image": _address(image, "image/png"),
        "paper": _address(pdf, "application/pdf"),
        "paper_name": paper,
        "width": width // 2,
        "height": height // 2,
    }


def _address(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _machines(provenance: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Runs by what made them, so that a sweep on one machine says it once."""
    alike: dict[str, list[str]] = {}
    for run, known in provenance.items():
        alike.setdefault(machine({**known, "time_utc": ""}).rstrip("; "), []).append(run)
    return list(alike.items())
