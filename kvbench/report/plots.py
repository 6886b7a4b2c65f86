"""The plots of a report: each only if its rows exist, each as PNG and as PDF of page width."""

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
from kvbench.report.budgets import perplexity_budget
from kvbench.report.candidates import group_key
from kvbench.report.curves import memory_context, tpot_context
from kvbench.report.differences import window_differences
from kvbench.report.heatmap import needle_maps
from kvbench.report.names import display_name
from kvbench.report.panels import styled
from kvbench.report.pareto import perplexity_bytes
from kvbench.report.positions import kl_position
from kvbench.report.quality import quality_bytes
from kvbench.report.roofline import bandwidth_bars
from kvbench.report.samples import Sample
from kvbench.report.style import Looks, styles
from kvbench.results.row import Row

MOST_SETTINGS = 4


class Draw(Protocol):
    """Draws a figure from rows, in the looks of the whole report; None without the rows it needs."""

    def __call__(self, rows: Sequence[Row], looks: Looks | None = None) -> Figure | None: ...


@dataclass(frozen=True)
class Plot:
    """A file that was drawn, and the words that go with it."""

    file: str
    title: str
    caption: str

    @property
    def alt(self) -> str:
        """For those who do not see it: the numbers themselves are in the tables."""
        return f"{self.title}: {self.caption}. The numbers stand in the tables below."


PLOTS: tuple[tuple[str, Draw, str, str], ...] = (
    (
        "perplexity_bytes",
        perplexity_bytes,
        "Perplexity against bytes",
        "Perplexity against the bytes that the cache holds; bars: 95% interval of the paired difference from the full "
        "cache (dashed); grey steps: the Pareto front",
    ),
    (
        "quality_bytes",
        quality_bytes,
        "Quality against bytes",
        "Each quality measure against the bytes that the cache holds; grey steps: the Pareto front",
    ),
    (
        "perplexity_budget",
        perplexity_budget,
        "Perplexity against budget",
        "Perplexity against the tokens kept per KV head; bars: 95% interval of the paired difference from the full "
        "cache (dashed)",
    ),
    ("needle", needle_maps, "Needle in a haystack", "Needles found, out of those hidden, by context length and depth"),
    (
        "kl_position",
        kl_position,
        "KL by position",
        "KL against the full cache by the position of the scored token, a panel a method, the others in grey; "
        "from pale to full colour: from the smallest to the largest budget",
    ),
    (
        "latency_context",
        tpot_context,
        "Time per output token",
        "Time per output token: the median, and on to the 90th percentile; thin: the fitted slope",
    ),
    (
        "bandwidth",
        bandwidth_bars,
        "Share of the memory's bandwidth",
        "Bytes that a step must read, over its time, as a share of what the memory was measured to give",
    ),
    (
        "memory_context",
        memory_context,
        "Memory against context",
        "Bytes that the cache holds; thin lines: the formulas",
    ),
)
DIFFERENCES = (
    "window_differences",
    "Difference by window",
    "NLL above the full cache's of every window, sorted, a panel a method, the others in grey; a method whose mean is "
    "harmless may still ruin some windows",
)


def draw_all(rows: Sequence[Row], folder: Path, samples: Sequence[Sample] = ()) -> list[Plot]:
    """Draw every plot that the rows and samples allow into `folder` and say what was drawn."""
    scored = (sample.row for sample in samples)  # of a run that still goes on they may be ahead of the rows
    looks = styles(display_name(row) for row in (*rows, *scored) if row.method)
    rows, left_out = _drawable(rows)
    drawn = []
    with styled():
        draws = [(name, title, caption, partial(draw, rows, looks)) for name, draw, title, caption in PLOTS]
        draws.append((*DIFFERENCES, partial(window_differences, samples, looks)))
        for name, title, caption, draw in draws:
            figure = draw()
            if figure is not None:
                save(figure, folder / name)
                drawn.append(Plot(f"{name}.png", title, caption + left_out))
    return drawn


def _drawable(rows: Sequence[Row]) -> tuple[Sequence[Row], str]:
    """The settings with most rows, as many as a page can show, and the words that say so."""
    counts = Counter(group_key(row) for row in rows if row.method)
    if len(counts) <= MOST_SETTINGS:
        return rows, ""
    chosen = {setting for setting, _ in counts.most_common(MOST_SETTINGS)}
    kept = [row for row in rows if group_key(row) in chosen]
    return kept, f"; {MOST_SETTINGS} of {len(counts)} models and settings, all of them are in the tables"


def save(figure: Figure, stem: Path) -> None:
    """The figure as PNG and PDF, each whole or not at all. Without a date: the same rows give the same file."""
    for kind, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        figure.set_layout_engine("none")  # the places found for the first serve the second
        write_atomic(stem.with_suffix(f".{kind}"), buffer.getvalue())
    plt.close(figure)
