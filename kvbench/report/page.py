"""The report folder: report.md with its tables as CSV and its plots as PNG beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.atomic import read_json, write_atomic
from kvbench.report.columns import short_model
from kvbench.report.findings import Finding, find_all, remarks
from kvbench.report.lines import measures_of
from kvbench.report.names import rows_of
from kvbench.report.plots import Plot, draw_all
from kvbench.report.table import Table, to_csv, to_markdown
from kvbench.report.tables import build_tables, shared_caption
from kvbench.results import METRICS, PROVENANCE, Row, find_runs, load, read_status

MOST_COMMANDS = 20
READING = """\
ΔNLL: nats per token above the full cache on the same tokens. KL: full cache against method, nats per token.
top-1: share of tokens for which both prefer the same next token. engaged: share of the scored tokens that
were predicted after an eviction or a quantisation. kept: tokens held per KV head. TTFT: time to first token.
TPOT: time per output token. Brackets: the interval that the rows give. The CSV files hold unrounded numbers.
"""


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write report.md, one CSV a table and the plots into `out`; returns the path of report.md.

    Works on runs that failed or still run: what is missing is said under the warnings. Raises UserError if
    the paths hold no run folder.
    """
    runs = find_runs(paths)
    rows = rows_of(load(paths)) if any((run / METRICS).exists() for run in runs) else []
    out.mkdir(parents=True, exist_ok=True)
    tables = build_tables(rows)
    for table in tables:
        write_atomic(out / f"{table.name}.csv", to_csv(table))
    plots = draw_all(rows, out)
    findings = find_all(rows, {run.name: read_status(run) for run in runs})
    provenance = {run.name: read_json(run / PROVENANCE) for run in runs}
    page = out / "report.md"
    write_atomic(page, _markdown(rows, tables, plots, findings, provenance))
    return page


def _markdown(
    rows: Sequence[Row],
    tables: Sequence[Table],
    plots: Sequence[Plot],
    findings: Sequence[Finding],
    provenance: Mapping[str, Mapping[str, Any]],
) -> str:
    models = ", ".join(dict.fromkeys(short_model(row.model) for row in rows if row.model))
    measures = ", ".join(measures_of(rows))
    size = f"{_number(len(provenance), 'run')}, {_number(len(rows), 'row')}"
    sections = [
        f"# KV cache comparison: {models}" if models else "# KV cache comparison",
        f"{size}: {measures}." if measures else f"{size}.",
        "## Reproduce\n\n" + _commands(provenance),
        "## Warnings\n\n" + _warnings(findings),
    ]
    shared = shared_caption(tables)
    if tables:
        common = f"All tables: {' · '.join(shared)}.\n\n" if shared else ""
        sections.append(f"## Results\n\n{common}{READING}")
    for table in tables:
        own = " · ".join(part for part in table.caption if part not in shared)
        numbers = f"Numbers: [{table.name}.csv]({table.name}.csv)"
        sections.append(f"### {table.title}\n\n{to_markdown(table)}\n{own + '. ' if own else ''}{numbers}")
    if plots:
        images = [f"![{plot.caption}]({plot.file})\n\n*{plot.caption}.*" for plot in plots]
        sections.append("## Plots\n\n" + "\n\n".join(images))
    if notes := remarks(rows):
        sections.append("## How it was measured\n\n" + _listed(notes))
    sections.append("## Provenance\n\n" + _provenance(provenance))
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _commands(provenance: Mapping[str, Mapping[str, Any]]) -> str:
    known = (str(of_run.get("command") or "") for of_run in provenance.values())
    commands = list(dict.fromkeys(filter(None, known)))
    if not commands:
        return "No command was recorded."
    more = len(commands) - MOST_COMMANDS
    rest = f"\n\n... and {more} more, each in its run's {PROVENANCE}." if more > 0 else ""
    return "```bash\n" + "\n".join(commands[:MOST_COMMANDS]) + "\n```" + rest


def _warnings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "None: every method engaged, nothing failed, nothing beat the full cache beyond an interval."
    return _listed(findings)


def _listed(findings: Sequence[Finding]) -> str:
    return "\n".join(f"- **{finding.kind}**: {_safe(finding.text)}" for finding in findings)


def _safe(text: str) -> str:
    """Text of others (error messages, notes) without the signs that Markdown would act on."""
    for sign in ("\\", "`", "*", "_", "<", "[", "]"):
        text = text.replace(sign, f"\\{sign}")
    return text


def _provenance(provenance: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for run, known in provenance.items():
        lines.append(f"- `{run}`: {_machine(known)}" if known else f"- `{run}`: no {PROVENANCE}")
    return "\n".join(lines)


def _machine(known: Mapping[str, Any]) -> str:
    packages = known.get("packages") or {}
    named = ("kvbench", "torch", "transformers")
    versions = [f"{name} {packages[name]}" for name in named if name in packages]
    git = known.get("git") or {}
    commit = f"commit {str(git['commit'])[:12]}" if git.get("commit") else "no commit recorded"
    if git.get("dirty"):
        commit += f" with changes (sha256 {str(git.get('diff_sha256'))[:12]})"
    cpu = known.get("cpu") or {}
    devices = [f"{cpu.get('name', 'unknown CPU')}, {cpu.get('usable_cores', '?')} cores"]
    devices += [str(gpu.get("name")) for gpu in known.get("gpus") or []]
    source = f"source {str(known.get('source_hash'))[:12]}"
    parts = [commit, source, *versions, f"Python {known.get('python', '?')}", *devices]
    threads = [f"{key}={value}" for key, value in (known.get("environment") or {}).items()]
    return "; ".join([*parts, *threads, str(known.get("time_utc", "time unknown"))])
