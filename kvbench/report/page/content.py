"""Everything that a report says, gathered from rows and run folders, whatever format it is written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.report.advice.answer_card import answer_card
from kvbench.report.advice.banner import Banner, banner
from kvbench.report.advice.card import AnswerCard
from kvbench.report.advice.hindsight import hindsight_findings
from kvbench.report.advice.summary import summary
from kvbench.report.compare.comparison import is_baseline, measures_of
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.names import short_model
from kvbench.report.compare.origins import origins_of
from kvbench.report.compare.texts import split_by_text
from kvbench.report.compare.warnings import ReportWarning, find_warnings, remarks
from kvbench.report.compare.window_samples import read_windows
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.figures.all_figures import DrawnFigure, draw_all
from kvbench.report.page.commands import RecordedRun
from kvbench.report.tables.headlines import reading_order
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview, traits_table
from kvbench.report.tables.published import published_tables
from kvbench.report.tables.table import Table
from kvbench.results.recorded_config import read_config, recorded_headlines
from kvbench.results.row import Row
from kvbench.results.run_files import read_metrics, read_provenance, read_status


@dataclass
class Report:
    """The content of a page. runs: by the name of the run folder, and by the name that its rows carry.

    card: None without a method.
    """

    title: str
    size: str
    summary: list[str]
    warnings: list[ReportWarning]
    banner: Banner
    card: AnswerCard | None
    tables: list[Table]
    traits: Table | None
    figures: list[DrawnFigure]
    remarks: list[ReportWarning]
    runs: dict[str, RecordedRun]
    provenance: dict[str, Mapping[str, Any]]


def build_report(runs: Sequence[Path], rows: Sequence[Row], out: Path) -> Report:
    """Draw the figures into `out` and gather everything else."""
    provenance: dict[str, Mapping[str, Any]] = {run.name: read_provenance(run) for run in runs}
    configs = {run: read_config(run) for run in runs}
    headlines = recorded_headlines(configs.values())
    windows = read_windows(runs)
    evidence = evidence_of(windows)
    groups = groups_of(rows, evidence)
    origins = origins_of(runs)
    head = overview(groups, headlines, evidence, origins)
    measured = [group for group in groups if group.members]
    samples = [sample for sample in windows if not is_baseline(sample.row)]
    folders = _folders_of_rows(runs)
    return Report(
        title=_title(rows),
        size=_size(rows, len(runs), measures_of(rows, reading_order(headlines))),
        summary=[*summary(groups), *hindsight_findings(evidence)],
        warnings=find_warnings(rows, {run.name: read_status(run) for run in runs}, evidence),
        banner=banner(rows, groups, evidence, {name: provenance[run.name] for name, run in folders.items()}),
        card=answer_card(groups, evidence),
        tables=[
            *([head] if head is not None else []),
            *build_tables(rows, headlines, evidence, origins),
            *published_tables(configs.values(), rows),
        ],
        traits=traits_table(measured),
        figures=draw_all(split_by_text(rows)[0], out, samples, runs, evidence.families),
        remarks=remarks(rows),
        runs=_recorded(configs, provenance, folders),
        provenance=provenance,
    )


def _folders_of_rows(runs: Sequence[Path]) -> dict[str, Path]:
    """The folder of each run by the name that its rows carry: published folders are renamed."""
    found: dict[str, Path] = {}
    for run in runs:
        metrics = read_metrics(run)
        names = [] if metrics is None else metrics["run"].unique().to_pylist()
        found |= {name: run for name in names if name is not None and name not in found}
    return found


def _recorded(
    configs: Mapping[Path, Mapping[str, Any]], provenance: Mapping[str, Mapping[str, Any]], folders: Mapping[str, Path]
) -> dict[str, RecordedRun]:
    """Command and config of each run, also under the name that its rows carry."""
    found = {
        run.name: RecordedRun(str(provenance[run.name].get("command") or ""), config) for run, config in configs.items()
    }
    return {name: found[run.name] for name, run in folders.items()} | found


def _title(rows: Sequence[Row]) -> str:
    full = dict.fromkeys(row.model for row in rows if row.model)
    models = [short_model(model, full) for model in full]
    shown = ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
    return f"KV cache comparison: {shown}" if models else "KV cache comparison"


def _size(rows: Sequence[Row], runs: int, measures: Sequence[str]) -> str:
    size = f"{_count(runs, 'run')}, {_count(len(rows), 'row')}"
    return f"{size}: {', '.join(measures)}." if measures else f"{size}."


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
