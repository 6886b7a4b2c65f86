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
from kvbench.report.compare.names import display_name
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.figures.bars import bandwidth_bars
from kvbench.report.figures.by_context import bytes_by_context, tpot_by_context
from kvbench.report.figures.kept_tokens import kept_figures
from kvbench.report.figures.layout import styled
from kvbench.report.figures.method_panels import kl_by_position, loss_by_window
from kvbench.report.figures.needle_maps import needle_maps
from kvbench.report.figures.pair_heat_maps import pair_heat_maps
from kvbench.report.figures.perplexity import perplexity_by_budget, perplexity_by_bytes
from kvbench.report.figures.quality_by_bytes import quality_by_bytes
from kvbench.report.figures.style import Looks, styles
from kvbench.results.row import Row

MOST_SETTINGS = 4


class Draw(Protocol):
    """Draws a figure from rows, with the colours of the whole report; None without the rows it needs."""

    def __call__(self, rows: Sequence[Row], looks: Looks | None = None) -> Figure | None: ...


@dataclass(frozen=True)
class DrawnFigure:
    """A figure on disk, with its title and caption."""

    file: str
    title: str
    caption: str

    @property
    def alt(self) -> str:
        """Text for readers who do not see the figure."""
        return f"{self.title}: {self.caption}. The tables hold the same numbers."


@dataclass(frozen=True)
class FigureKind:
    """A figure that a report may have. name: stem of its files."""

    name: str
    draw: Draw
    title: str
    caption: str


FIGURES = (
    FigureKind(
        "perplexity_bytes",
        perplexity_by_bytes,
        "Perplexity against bytes",
        "Perplexity against the bytes of one sequence in the cache that was scored; vertical lines: 95% interval of "
        "the paired difference from the full cache (dashed line), over these windows only; grey steps: Pareto front",
    ),
    FigureKind(
        "quality_bytes",
        quality_by_bytes,
        "Quality against bytes",
        "Each quality metric against the bytes of one sequence in the cache that was scored; grey steps: Pareto front",
    ),
    FigureKind(
        "perplexity_budget",
        perplexity_by_budget,
        "Perplexity against budget",
        "Perplexity against the tokens kept per KV head; vertical lines: 95% interval of the paired difference from "
        "the full cache (dashed line), over these windows only",
    ),
    FigureKind("needle", needle_maps, "Needle in a haystack", "Needles found out of those hidden, by length and depth"),
    FigureKind(
        "kl_position",
        kl_by_position,
        "KL by position",
        "KL against the full cache by position of the scored token; one panel for each method, all others in grey; "
        "pale to full colour: smallest to largest budget",
    ),
    FigureKind(
        "latency_context",
        tpot_by_context,
        "Time per output token",
        "Time per output token; marker or bar: median; line: to the 90th percentile; thin black line: fitted slope",
    ),
    FigureKind(
        "bandwidth",
        bandwidth_bars,
        "Share of memory bandwidth",
        "Bytes that a step must read, divided by its time, as a share of the measured memory bandwidth",
    ),
    FigureKind(
        "memory_context",
        bytes_by_context,
        "Bytes against context",
        "Bytes that the cache holds; thin lines: what the formulas of the stores give",
    ),
)
LOSS_BY_WINDOW = (
    "window_differences",
    "Loss by window",
    "NLL above the full cache's for every window, sorted; one panel for each method, all others in grey. A small mean "
    "may hide a few windows with a large loss",
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

    families: methods that were compared with each other on the same windows.
    """
    scored = (sample.row for sample in samples)  # a run that is still going may have samples without rows
    looks = styles(display_name(row) for row in (*rows, *scored) if row.method)
    rows, left_out = _drawable(rows)
    drawn = []
    with styled():
        draws = [(kind.name, kind.title, kind.caption, partial(kind.draw, rows, looks)) for kind in FIGURES]
        draws.append((*LOSS_BY_WINDOW, partial(loss_by_window, samples, looks)))
        draws.append((*METHOD_PAIRS, partial(pair_heat_maps, families)))
        for name, title, caption, draw in draws:
            figure = draw()
            if figure is not None:
                save(figure, folder / name)
                drawn.append(DrawnFigure(f"{name}.png", title, caption + left_out))
        for kept in kept_figures(runs):
            save(kept.figure, folder / kept.name)
            drawn.append(DrawnFigure(f"{kept.name}.png", "Tokens kept", kept.caption))
    return drawn


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
