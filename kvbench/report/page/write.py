"""Writes the report folder: two pages (HTML, Markdown), figures, and tables as CSV, Parquet, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.files import write_atomic
from kvbench.report.compare.warnings import lost_rows
from kvbench.report.compare.window_samples import read_windows
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.page.content import build_report
from kvbench.report.page.html import changes_html, details_html, has_details, report_html
from kvbench.report.page.latex import to_latex
from kvbench.report.page.markdown import details_markdown, report_markdown
from kvbench.report.page.pages import DETAILS
from kvbench.report.page.table_files import to_csv, to_markdown, written_forms
from kvbench.report.tables.changes import changes, changes_sentence, changes_table
from kvbench.report.tables.table import Table
from kvbench.results.loading import find_runs, load, load_what_is_there
from kvbench.results.recorded_config import read_config, recorded_headlines
from kvbench.results.row import rows_of

MOST_LINES = 40
"""Changes that a terminal shows."""


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write both pages, the tables and the figures into `out`; returns the path of report.html.

    Runs that failed or are still going are reported as they stand, with warnings; damaged files are skipped, and a
    warning says how many rows are lost. Raises UserError if the paths hold no run folder.
    """
    runs = find_runs(paths)
    loaded = load_what_is_there(paths)
    out.mkdir(parents=True, exist_ok=True)
    report = build_report(runs, rows_of(loaded.frame), out)
    report.warnings[:0] = lost_rows(loaded)
    for table in [*report.tables, *([report.traits] if report.traits else [])]:
        for ending, content in written_forms(table).items():
            write_atomic(out / f"{table.name}.{ending}", content)
    write_atomic(out / "report.md", report_markdown(report))
    if has_details(report):
        write_atomic(out / f"{DETAILS}.md", details_markdown(report))
        write_atomic(out / f"{DETAILS}.html", details_html(report, out))
    page = out / "report.html"
    write_atomic(page, report_html(report, out))
    return page


def write_changes(old: Path, new: Path, out: Path) -> tuple[Table | None, str]:
    """Write against.html, .md, .csv and .tex into `out`; returns the table for a terminal and a sentence.

    The table for a terminal holds at most MOST_LINES changes and none without a verdict; the files hold all changes.
    Raises UserError if one of the two paths holds no rows.
    """
    before, after = rows_of(load(old)), rows_of(load(new))
    headlines = recorded_headlines(read_config(run) for run in find_runs([old, new]))
    windows = [evidence_of(read_windows(find_runs([path]))) for path in (old, new)]
    found, same = changes(before, after, headlines, (windows[0], windows[1]))
    table = changes_table(found, [*before, *after])
    sentence = changes_sentence(found, same)
    out.mkdir(parents=True, exist_ok=True)
    title = f"{old.name} against {new.name}"
    write_atomic(out / "against.csv", to_csv(table))
    write_atomic(out / "against.tex", to_latex(table))
    write_atomic(out / "against.md", f"# {title}\n\n{sentence}\n\n{to_markdown(table) if found else ''}")
    write_atomic(out / "against.html", changes_html(table if found else None, title, sentence))
    shown = [change for change in found if change.kind != "no verdict"][:MOST_LINES]
    return changes_table(shown, [*before, *after]) if shown else None, sentence
