"""report.md and details.md: the report for the viewer of a repository, with its tables and figures beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.report.compare.warnings import ReportWarning
from kvbench.report.figures.all_figures import DrawnFigure
from kvbench.report.page.card_markdown import banner_markdown, card_markdown, safe
from kvbench.report.page.content import Report
from kvbench.report.page.pages import DETAILS, split_figures, split_tables
from kvbench.report.page.table_files import to_markdown
from kvbench.report.tables.table import Table, shared_caption
from kvbench.results.run_files import PROVENANCE

MOST_COMMANDS = 20
NO_WARNINGS = (
    "None: every method evicted or quantised, nothing failed, no method scored above the full cache beyond an interval."
)
READING = """\
ΔNLL: nats a token above the full cache on the same tokens. KL: from the full cache to the method, nats a token. top-1:
share of tokens for which both predict the same next token. engaged: share of the scored tokens that were predicted
after an eviction or a quantisation. kept: tokens held per KV head. TTFT: time to first token. TPOT: time per output
token. TPOT / full's: median step over the full cache's in the same run, below 1 is faster. a token: held bytes divided
by tokens seen. x smaller: bytes of the full cache of the same model and run, divided by bytes held, free slots
included. x smaller than 16-bit: bytes of a full cache in 16 bits, divided by bytes held, means while scored. decode:
append adds decoded tokens to the budget, evict holds the budget. Brackets: 95% intervals (how they are computed: under
How it was measured). Bold: better than every other method beyond the intervals; for perplexity by paired tests over
windows, as the caption says. The CSV files hold unrounded numbers.
"""


def report_markdown(report: Report) -> str:
    """The default page as Markdown, links relative to its folder."""
    tables, more_tables = split_tables(report.tables)
    figures, more_figures = split_figures(report.figures)
    further = bool(more_tables or more_figures or report.traits is not None)
    sections = [
        f"# {report.title}",
        report.size,
        banner_markdown(report.banner),
        card_markdown(report.card) if report.card is not None else "",
        "## Warnings\n\n" + (_listed(report.warnings) or NO_WARNINGS),
        "## Summary\n\n" + "\n".join(f"- {safe(sentence)}" for sentence in report.summary) if report.summary else "",
        "## Figures\n\n" + _figures(figures) if figures else "",
        *_tables(tables),
        f"More figures and tables: [{DETAILS}.md]({DETAILS}.md)." if further else "",
        "## How it was measured\n\n" + _listed(report.remarks) if report.remarks else "",
        "## Reproduce\n\n" + commands(report),
        "## Provenance\n\n"
        + "\n".join(f"- `{run}`: {machine_text(known)}" for run, known in report.provenance.items()),
    ]
    return _joined(sections)


def details_markdown(report: Report) -> str:
    """The second page as Markdown: all figures and tables that the default page leaves out."""
    _, tables = split_tables(report.tables)
    _, figures = split_figures(report.figures)
    sections = [
        f"# {report.title}: details",
        "The main figures and tables are in [report.md](report.md).",
        "## Figures\n\n" + _figures(figures) if figures else "",
        *_tables(tables),
        f"## Traits\n\n{to_markdown(report.traits)}" if report.traits is not None else "",
    ]
    return _joined(sections)


def _joined(sections: Sequence[str]) -> str:
    return "\n\n".join(section.rstrip("\n") for section in sections if section) + "\n"


def commands(report: Report) -> str:
    """The commands of the runs as a code block, each once."""
    known = list(dict.fromkeys(run.command for run in report.runs.values() if run.command))
    if not known:
        return "No command was recorded."
    more = len(known) - MOST_COMMANDS
    rest = f"\n\n... and {more} more, each in its run's {PROVENANCE}." if more > 0 else ""
    return "```bash\n" + "\n".join(known[:MOST_COMMANDS]) + "\n```" + rest


def _tables(tables: Sequence[Table]) -> list[str]:
    shared = shared_caption([table for table in tables if not table.name.startswith(("overview", "published"))])
    sections = []
    if tables:
        common = f"All tables: {' · '.join(shared)}.\n\n" if shared else ""
        sections.append(f"## Results\n\n{common}{READING}")
    for table in tables:
        own = " · ".join(part for part in table.caption if part not in shared)
        files = ", ".join(f"[{ending}]({table.name}.{ending})" for ending in ("csv", "parquet", "tex"))
        sections.append(f"### {table.title}\n\n{to_markdown(table)}\n{own + '. ' if own else ''}Numbers: {files}")
    return sections


def _figures(figures: Sequence[DrawnFigure]) -> str:
    return "\n\n".join(_figure(figure) for figure in figures)


def _figure(figure: DrawnFigure) -> str:
    paper = f"{figure.file.removesuffix('.png')}.pdf"
    image = f"![{_alt(figure.alt)}]({figure.file})"
    return f"### {figure.title}\n\n{image}\n\n*{figure.caption}.* [pdf]({paper})"


def _alt(text: str) -> str:
    """Alt text without the signs that would end it or be read as Markdown."""
    return text.replace("[", "(").replace("]", ")").replace("\n", " ")


def _listed(warnings: Sequence[ReportWarning]) -> str:
    return "\n".join(f"- **{warning.kind}**: {safe(warning.text)}" for warning in warnings)


def machine_text(known: Mapping[str, Any]) -> str:
    """Code, packages and machine of a run in one line."""
    if not known:
        return f"no {PROVENANCE}"
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
