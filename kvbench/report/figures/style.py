"""Colour and marker of each family of methods, the same in all figures and on the page; sizes for a printed page."""

from __future__ import annotations

from typing import Any

from kvbench.report.compare.comparison import sees_future
from kvbench.report.compare.method_kinds import family_of
from kvbench.results.row import Row

COLOURS = {
    "quantised": "#0B6BB0",
    "score": "#C03A00",
    "position": "#117733",
    "mixed": "#7D2A8F",
    "other": "#4A2000",
    "reference": "#5F5F5F",
}
"""By family. Each has a contrast of at least 4.5 to white, and they stay apart without red or green."""
MARKERS = {"quantised": "s", "score": "o", "position": "^", "mixed": "D", "other": "v", "reference": "X"}
"""By family, for prints without colour."""
# matplotlib settings for figures 6.5 inches wide, the text width of a page.
RC = {
    "font.size": 9,
    "text.hinting": "none",  # labels keep their width at every resolution
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "savefig.dpi": 200,
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
WIDTH = 6.5
INK = "#222222"
FAINT = "#707070"


def ink_on(red: float, green: float, blue: float) -> str:
    """Black or white, whichever has more contrast (at least 4.5) to a colour given as shares of sRGB."""
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in (red, green, blue)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def colour_of(row: Row) -> str:
    """The colour of a method's family."""
    return COLOURS[family_of(row)]


def mark_of(row: Row) -> dict[str, Any]:
    """Keyword arguments for `Axes.plot` that draw a method's mark: hollow where the method sees the future."""
    colour, future = colour_of(row), sees_future(row)
    marker = "o" if future else MARKERS[family_of(row)]  # a hollow cross looks filled
    look = {"marker": marker, "color": colour, "markerfacecolor": "white" if future else colour}
    return look | {"markeredgecolor": colour, "markeredgewidth": 1.2}


def bar_of(row: Row) -> dict[str, Any]:
    """Keyword arguments for `Axes.barh`: hollow where the method sees the future."""
    colour = colour_of(row)
    return {"facecolor": "white" if sees_future(row) else colour, "edgecolor": colour, "linewidth": 1}
