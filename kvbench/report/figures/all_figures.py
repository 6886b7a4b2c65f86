"""All figures of a report: each only if its rows exist, each as PNG and as PDF of page width."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from kvbench.files import write_atomic
from kvbench.report.compare.comparison import comparison_key
from kvbench.report.compare.method_families import MethodFamily
from kvbench.report.compare.window_intervals import window_intervals
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.figures.bars import bandwidth_bars, memory_parts, speed_bars
from kvbench.report.figures.by_context import bytes_by_context, tpot_by_context
from kvbench.report.figures.error_maps import error_maps
from kvbench.report.figures.gap_closed import gap_closed_dots
from kvbench.report.figures.kept_tokens import kept_figures
from kvbench.report.figures.layout import Plot, styled
from kvbench.report.figures.loss_axis import HOPELESS, LOWEST_KL
from kvbench.report.figures.method_panels import kl_by_position, loss_by_window, perplexity_by_budget
from kvbench.report.figures.needle_maps import needle_maps
from kvbench.report.figures.needle_tasks import needle_tasks
from kvbench.report.figures.pair_heat_maps import pair_heat_maps
from kvbench.report.figures.stream_answers import answers_by_length
from kvbench.report.figures.trade_off import difference_by_size, kl_by_size, top1_by_size
from kvbench.report.figures.turns import turns
from kvbench.results.paired import MARGIN
from kvbench.results.row import Row

MOST_SETTINGS = 4
MOST_MAIN = 8
"""Figures on the default page."""
LEAD = ("kl_smaller.png", "nll_smaller.png")


class Draw(Protocol):
    """Draws a figure from rows; None without the rows it needs."""

    def __call__(self, rows: Sequence[Row]) -> Plot | None: ...


@dataclass(frozen=True)
class DrawnFigure:
    """A figure on disk, with its title and caption. says: its main numbers. main: shown on the default page."""

    file: str
    title: str
    caption: str
    says: str = ""
    main: bool = False

    @property
    def lead(self) -> bool:
        """The figure compares quality and size of all methods, so it stands before the tables."""
        return self.file in LEAD

    @property
    def alt(self) -> str:
        """Text for readers who do not see the figure."""
        return f"{self.title}. {self.says}".strip()


@dataclass(frozen=True)
class FigureKind:
    """A figure that a report may have. name: stem of its files. main: for the default page."""

    name: str
    draw: Draw
    title: str
    caption: str
    main: bool = False


HOW_TO_READ = (
    "better to the lower right. One colour for each family; thin line: budgets of one method; grey steps: Pareto "
    "front; hollow: sees the future; vertical lines: 95% interval over windows, where samples were recorded"
)
FIGURES = (
    FigureKind(
        "kl_smaller",
        kl_by_size,
        "KL against size",
        f"KL to the full cache against x smaller than a full cache in 16 bits, both of the cache that was scored; "
        f"{HOW_TO_READ}. Methods beyond {HOPELESS:g} nats stand at the upper edge, values below {LOWEST_KL:g} at the "
        "lower one; above the panel: names and values of clipped methods and of those without room for a label",
        main=True,
    ),
    FigureKind(
        "nll_smaller",
        difference_by_size,
        "NLL difference against size",
        f"NLL minus the full cache's on the same tokens against x smaller than a full cache in 16 bits, both of the "
        f"cache that was scored; {HOW_TO_READ}. Shaded: within the margin of {MARGIN:g} nats; beyond it the axis is "
        f"logarithmic. Methods beyond {HOPELESS:g} nats stand at the upper edge; above the panel: names and values of "
        "clipped methods and of those without room for a label",
        main=True,
    ),
    FigureKind(
        "gap_closed",
        gap_closed_dots,
        "Gap closed",
        "Share of the gap between random eviction (0%) and hindsight (100%) that a keep rule closes at equal kept "
        "tokens; lines: 95% interval",
        main=True,
    ),
    FigureKind(
        "needle_tasks",
        needle_tasks,
        "Retrieval by task",
        "Share of needles found, by task, over all lengths and depths; hatched: the full cache finds fewer than half",
        main=True,
    ),
    FigureKind(
        "needle",
        needle_maps,
        "Needle in a haystack",
        "Needles found out of those hidden, by length and depth",
        main=True,
    ),
    FigureKind(
        "speed",
        speed_bars,
        "Speed",
        "Tokens a second as percent of the full cache timed in the same run, at the longest context; beyond the line: "
        "faster. Methods without a full cache in their run are left out",
        main=True,
    ),
    FigureKind(
        "memory_context",
        bytes_by_context,
        "Bytes against context",
        "Bytes that the cache holds; thin lines: what the formulas of the stores give; grey: the other methods",
        main=True,
    ),
    FigureKind(
        "top1_smaller",
        top1_by_size,
        "Top-1 agreement against size",
        "Share of tokens for which the method and the full cache predict the same next token, against x smaller than a "
        f"full cache in 16 bits; {HOW_TO_READ.replace('lower right', 'upper right')}",
    ),
    FigureKind(
        "perplexity_budget",
        perplexity_by_budget,
        "Perplexity against budget",
        "Perplexity against the tokens kept per KV head; dashed: the full cache; grey: the other methods",
    ),
    FigureKind(
        "kl_position",
        kl_by_position,
        "KL by position",
        "KL against the full cache by position of the scored token; grey: the other methods; pale to full colour: "
        "smallest to largest budget",
    ),
    FigureKind(
        "stream_length",
        answers_by_length,
        "Answers about what was written earlier",
        "Share of right answers after a working-out of this many tokens, which evicts while it is written; the mean "
        "over synthetic tasks of which the full cache answers half or more; grey: the other methods",
    ),
    FigureKind(
        "turns",
        turns,
        "Hits by turn",
        "Share of questions answered, by turn; pale: the text is compressed before any question is known; full colour: "
        "the first question is compressed with it, later turns ask something else; grey: the other methods",
    ),
    FigureKind(
        "latency_context",
        tpot_by_context,
        "Time per output token",
        "Median time per output token; thin black line: fitted slope; grey: the other methods",
    ),
    FigureKind(
        "bandwidth",
        bandwidth_bars,
        "Share of memory bandwidth",
        "Bytes that a step must read, divided by its time, as a share of the measured memory bandwidth",
    ),
    FigureKind(
        "memory_parts",
        memory_parts,
        "Bytes by part",
        "Bytes that the cache holds, by part, at the longest context; vertical line: the formula of a dense cache",
    ),
)
LOSS_BY_WINDOW = (
    "window_differences",
    "Loss by window",
    "NLL above the full cache's for every window, sorted; grey: the other methods. A small mean may hide a few windows "
    "with a large loss",
)
ERROR_MAPS = (
    "error_maps",
    "Error of the attention output",
    "Norm of the attention output's difference from exact attention, as a share of the exact output's norm, by layer "
    "and KV head; mean over windows; logarithmic colours",
)
METHOD_PAIRS = (
    "method_pairs",
    "Methods compared pairwise",
    "Mean NLL of the row's method minus the column's on the same windows, nats; one panel for each budget and decode "
    "mode. Full colour and bold: the two can be told apart (paired t test over windows, Holm-corrected, 5%); pale: "
    "they cannot",
)


def draw_all(
    rows: Sequence[Row],
    folder: Path,
    samples: Sequence[WindowSample] = (),
    runs: Sequence[Path] = (),
    families: Sequence[MethodFamily] = (),
) -> list[DrawnFigure]:
    """Draw every figure for which there are rows, samples or kept tokens of `runs` into `folder`; returns them.

    families: methods that were compared with each other on the same windows. Figures of the default page come first.
    """
    intervals = window_intervals(samples)
    rows, left_out = _drawable(rows)
    drawn = []
    with styled():
        for kind in FIGURES:
            over_windows = kind.draw in (kl_by_size, difference_by_size, top1_by_size)
            plot = kind.draw(rows, intervals=intervals) if over_windows else kind.draw(rows)  # type: ignore[call-arg]
            if plot is not None:
                drawn.append(_drawn(plot, folder, kind.name, kind.title, kind.caption + left_out, main=kind.main))
        for (name, title, caption), draw in (
            (METHOD_PAIRS, partial(pair_heat_maps, families)),
            (LOSS_BY_WINDOW, partial(loss_by_window, samples)),
            (ERROR_MAPS, partial(error_maps, runs)),
        ):
            if (plot := draw()) is not None:
                drawn.append(_drawn(plot, folder, name, title, caption, main=name == METHOD_PAIRS[0]))
        for kept in kept_figures(runs):
            drawn.append(_drawn(Plot(kept.figure, kept.says), folder, kept.name, "Tokens kept", kept.caption))
    return sorted(drawn, key=lambda figure: not figure.main)


def _drawn(plot: Plot, folder: Path, name: str, title: str, caption: str, *, main: bool = False) -> DrawnFigure:
    save(plot.figure, folder / name)
    return DrawnFigure(f"{name}.png", title, caption, plot.says, main)


def _drawable(rows: Sequence[Row]) -> tuple[Sequence[Row], str]:
    """The rows of at most MOST_SETTINGS models and devices, and the part of a caption that says so."""
    counts = Counter(comparison_key(row, across_measures=True) for row in rows if row.method)
    if len(counts) <= MOST_SETTINGS:
        return rows, ""
    chosen = {setting for setting, _ in counts.most_common(MOST_SETTINGS)}
    kept = [row for row in rows if comparison_key(row, across_measures=True) in chosen]
    return kept, f"; {MOST_SETTINGS} of {len(counts)} models and settings, the tables hold all"


def save(figure: Figure, stem: Path) -> None:
    """Write the figure as PNG and PDF, each atomically and without a date, so the same rows give the same files."""
    for kind, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        figure.set_layout_engine("none")  # the PDF takes the layout of the PNG
        write_atomic(stem.with_suffix(f".{kind}"), buffer.getvalue())
    plt.close(figure)
