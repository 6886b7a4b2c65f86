"""The report folder: report.html and report.md, every table as CSV, Parquet, Markdown and LaTeX, every plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kvbench.files import read_json, write_atomic
from kvbench.report.advice import advise
from kvbench.report.candidates import Group, groups_of
from kvbench.report.columns import short_model
from kvbench.report.commands import Recorded
from kvbench.report.findings import Finding, find_all, remarks
from kvbench.report.html import to_html
from kvbench.report.kept import draw_kept
from kvbench.report.lines import measures_of
from kvbench.report.markdown import to_page
from kvbench.report.overview import overview
from kvbench.report.plots import Plot, draw_all
from kvbench.report.published import published_tables
from kvbench.report.samples import read_samples
from kvbench.report.summary import summary
from kvbench.report.table import Table, to_csv, to_latex, to_markdown, to_parquet
from kvbench.report.tables import build_tables
from kvbench.report.traits_table import traits_table
from kvbench.report.verdict import Advice
from kvbench.results.loading import find_runs, load
from kvbench.results.row import Row, rows_of
from kvbench.results.run_files import METRICS, PROVENANCE, read_status


@dataclass
class Report:
    """Everything that a page says, whatever it is written in."""

    title: str
    size: str
    summary: list[str]
    findings: list[Finding]
    advice: list[Advice]
    tables: list[Table]
    traits: Table | None
    plots: list[Plot]
    remarks: list[Finding]
    runs: dict[str, Recorded]
    provenance: dict[str, Mapping[str, Any]]


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write report.html, report.md, the tables and the plots into `out`; returns the path of report.html.

    Works on runs that failed or still run: what is missing is said under the warnings. Raises UserError if
    the paths hold no run folder.
    """
    runs = find_runs(paths)
    rows = rows_of(load(paths)) if any((run / METRICS).exists() for run in runs) else []
    out.mkdir(parents=True, exist_ok=True)
    report = build_report(runs, rows, out)
    for table in [*report.tables, *([report.traits] if report.traits else [])]:
        for ending, content in written_forms(table).items():
            write_atomic(out / f"{table.name}.{ending}", content)
    write_atomic(out / "report.md", to_page(report))
    page = out / "report.html"
    write_atomic(page, to_html(report, out))
    return page


def written_forms(table: Table) -> dict[str, str | bytes]:
    """A table as files: the ending of each and its content."""
    return {"csv": to_csv(table), "parquet": to_parquet(table), "md": to_markdown(table), "tex": to_latex(table)}


def build_report(runs: Sequence[Path], rows: Sequence[Row], out: Path) -> Report:
    """Draw the plots into `out` and gather everything else."""
    provenance: dict[str, Mapping[str, Any]] = {run.name: read_json(run / PROVENANCE) for run in runs}
    groups = groups_of(rows)
    head = overview(groups)
    return Report(
        title=_title(rows),
        size=_size(rows, len(runs)),
        summary=summary(groups),
        findings=find_all(rows, {run.name: read_status(run) for run in runs}),
        advice=advise(groups),
        tables=[*([head] if head is not None else []), *build_tables(rows), *published_tables(runs, rows)],
        traits=traits_table(_measured(groups)),
        plots=[*draw_all(rows, out, read_samples(runs)), *draw_kept(runs, out)],
        remarks=remarks(rows),
        runs=_recorded(runs, provenance),
        provenance=provenance,
    )


def _recorded(runs: Sequence[Path], provenance: Mapping[str, Mapping[str, Any]]) -> dict[str, Recorded]:
    """By the name of the folder, and by the one its rows carry: published folders are renamed."""
    found = {run.name: Recorded(str(provenance[run.name].get("command") or ""), run) for run in runs}
    for run in runs:
        if (run / METRICS).exists():
            file = pq.ParquetFile(run / METRICS)
            known = ["run"] if "run" in file.schema_arrow.names else []  # folders of other versions may lack it
            names = file.read(columns=known)["run"].unique().to_pylist() if known else []
            found |= {name: found[run.name] for name in names if name is not None and name not in found}
    return found


def _measured(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.members]


def _title(rows: Sequence[Row]) -> str:
    full = dict.fromkeys(row.model for row in rows if row.model)
    models = [short_model(model, full) for model in full]
    shown = ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
    return f"KV cache comparison: {shown}" if models else "KV cache comparison"


def _size(rows: Sequence[Row], runs: int) -> str:
    measures = ", ".join(measures_of(rows))
    size = f"{_number(runs, 'run')}, {_number(len(rows), 'row')}"
    return f"{size}: {measures}." if measures else f"{size}."


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
