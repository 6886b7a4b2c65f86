"""The plots of a report: each only if its rows exist, each a PNG of page width."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from kvbench.atomic import write_atomic
from kvbench.report.curves import memory_context, tpot_context
from kvbench.report.heatmap import needle_maps
from kvbench.report.panels import styled
from kvbench.report.pareto import perplexity_bytes
from kvbench.results import Row

Draw = Callable[[Sequence[Row]], Figure | None]
PLOTS: tuple[tuple[str, Draw, str], ...] = (
    (
        "perplexity_bytes",
        perplexity_bytes,
        "Perplexity, with its interval, against the bytes that the cache holds; dashed: the full cache",
    ),
    ("needle", needle_maps, "Needles found, out of those hidden, by context length and depth"),
    ("latency_context", tpot_context, "Time per output token: the median, and on to the 90th percentile"),
    ("memory_context", memory_context, "Bytes that the cache holds, beside the dense formula"),
)


@dataclass(frozen=True)
class Plot:
    """A file that was drawn, and the words that go under it."""

    file: str
    caption: str


def draw_all(rows: Sequence[Row], folder: Path) -> list[Plot]:
    """Draw every plot that the rows allow into `folder` and say what was drawn."""
    drawn = []
    with styled():
        for name, draw, caption in PLOTS:
            figure = draw(rows)
            if figure is None:
                continue
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            plt.close(figure)
            write_atomic(folder / f"{name}.png", buffer.getvalue())
            drawn.append(Plot(f"{name}.png", caption))
    return drawn
