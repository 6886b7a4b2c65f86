"""Bars, one for each method: time per output token and held bytes at one context, and share of memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import lines_of
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Drawn
from kvbench.report.figures.style import FAINT, INK, WIDTH, Looks, styles
from kvbench.results.row import MEMORY_PARTS, Row

PART_COLOURS = {
    "dense": "#999999",
    "codes": "#332288",
    "scales": "#56B4E9",
    "residual": "#E69F00",
    "basis": "#999933",
    "scores": "#882255",
    "positions": "#117733",
    "state": "#CC79A7",
}
OTHER = "#D0D0D0"
BANDWIDTH = "bandwidth_share"
MOST_WIDE = 26
"""With more bars the bars are thinner, so that they fit a page."""


def tpot_bars(groups: dict[str, list[Drawn]], looks: Looks) -> Figure:
    """Median time per output token as a bar, with a line up to a tick at the 90th percentile."""
    figure, axes_list = _figure_of(groups, 0.9)
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        _prepare(axes, title, members)
        for y, drawn in enumerate(members):
            p50 = drawn.line.value("tpot_p50_ms") or 0
            p90 = drawn.line.value("tpot_p90_ms") or p50
            axes.barh(y, p50, height=0.62, **looks[drawn.name].bar())
            axes.plot([p50, p90], [y, y], color=FAINT, linewidth=1.2)
            axes.plot([p90], [y], marker="|", color=FAINT, markersize=6)
            _number(axes, max(p50, p90), y, number_text.significant(p50))
        _finish(axes, f"ms per output token at {_context_of(members)}: median, tick at the 90th percentile")
    return figure


def memory_bars(groups: dict[str, list[Drawn]], size: float, unit: str) -> Figure:
    """Held bytes by part, in units of `size` bytes; the thin line is the formula of a dense cache."""
    figure, axes_list = _figure_of(groups, 1.15)
    found: set[str] = set()
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        _prepare(axes, title, members)
        dense = next((value for drawn in members for value in drawn.line.values("dense_bytes")), None)
        if dense is not None:
            axes.axvline(dense / size, color=INK, linewidth=0.7, zorder=1)
        for y, drawn in enumerate(members):
            held = drawn.line.value("held_bytes") or 0
            parts = {part: drawn.line.value(f"held_bytes.{part}") or 0 for part in MEMORY_PARTS}
            parts["other"] = max(0, held - sum(parts.values()))
            left = 0.0
            for part, value in parts.items():
                if value > 1e-4 * held:
                    axes.barh(y, value / size, left=left, height=0.62, color=PART_COLOURS.get(part, OTHER))
                    left += value / size
                    found.add(part)
            _number(axes, left, y, number_text.significant(held / size))
        _finish(axes, f"held by the cache at {_context_of(members)}, {unit}")
    handles: list[Patch | Line2D] = [
        Patch(color=PART_COLOURS.get(part, OTHER), label=part) for part in (*MEMORY_PARTS, "other") if part in found
    ]
    handles.append(Line2D([], [], color=INK, linewidth=0.7, label="dense formula"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=8,
        frameon=False,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.2,
    )
    return figure


def _figure_of(groups: dict[str, list[Drawn]], frame: float) -> tuple[Figure, list[Axes]]:
    most = max(map(len, groups.values()))
    return layout.figure_of(len(groups), frame + most * (0.26 if most <= MOST_WIDE else 0.18), columns=1)


def _prepare(axes: Axes, title: str, members: Sequence[Drawn]) -> None:
    axes.set_title(layout.fitted(title, WIDTH))
    axes.set_yticks(range(len(members)), [layout.shortened(drawn.label) for drawn in members])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _number(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=8)


def _finish(axes: Axes, label: str) -> None:
    axes.margins(x=0.1, y=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)


def _context_of(members: Sequence[Drawn]) -> str:
    return f"{members[0].line.row.context or 0:,} tokens of context"


def bandwidth_bars(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Share of the memory bandwidth that a step reaches, at the longest context of each setting; None without rows."""
    lines = [line for line in lines_of(rows, "latency") if line.value(BANDWIDTH) is not None and line.row.context]
    groups = {title: _longest(members) for title, members in layout.grouped(lines, join_architectures=True).items()}
    if not groups:
        return None
    looks = looks or styles(drawn.name for members in groups.values() for drawn in members)
    figure, axes_list = _figure_of(groups, 0.9)
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        _bandwidth_panel(axes, title, members, looks)
    return figure


def _longest(members: Sequence[Drawn]) -> list[Drawn]:
    longest = max(drawn.line.row.context or 0 for drawn in members)
    return [drawn for drawn in members if drawn.line.row.context == longest]


def _bandwidth_panel(axes: Axes, title: str, members: Sequence[Drawn], looks: Looks) -> None:
    _prepare(axes, title, members)
    for y, drawn in enumerate(members):
        share = drawn.line.value(BANDWIDTH) or 0
        axes.barh(y, 100 * share, height=0.62, **looks[drawn.name].bar())
        _number(axes, 100 * share, y, number_text.percent(share))
    axes.axvline(100, color=INK, linewidth=0.7)
    _finish(axes, f"share of the memory's bandwidth, %, at {_context_of(members)}")
    axes.set_xlim(right=max(112, axes.get_xlim()[1]))
