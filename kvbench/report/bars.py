"""Time per output token and held bytes at a single context: one bar a method."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvbench.report import panels, units
from kvbench.report.panels import Drawn
from kvbench.report.style import FAINT, INK, WIDTH, Looks

# Fixed order and look of the parts of a cache.
PARTS = {
    "dense": "#999999",
    "codes": "#332288",
    "scales": "#56B4E9",
    "residual": "#E69F00",
    "scores": "#882255",
    "positions": "#117733",
    "state": "#CC79A7",
}
OTHER = "#D0D0D0"
MOST_WIDE = 26  # bars with air about them; more are set closer, so that they fit a page


def tpot(groups: dict[str, list[Drawn]], looks: Looks) -> Figure:
    """Median time per output token, with a tick at the 90th percentile."""
    figure, axes_list = figure_of(groups, 0.9)
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        prepare(axes, title, members)
        for y, drawn in enumerate(members):
            p50 = drawn.line.value("tpot_p50_ms") or 0
            p90 = drawn.line.value("tpot_p90_ms") or p50
            axes.barh(y, p50, height=0.62, **looks[drawn.name].bar())
            axes.plot([p50, p90], [y, y], color=FAINT, linewidth=1.2)
            axes.plot([p90], [y], marker="|", color=FAINT, markersize=6)
            number(axes, max(p50, p90), y, units.significant(p50))
        finish(axes, f"ms per output token at {context_of(members)}: median, tick at the 90th percentile")
    return figure


def memory(groups: dict[str, list[Drawn]], size: float, unit: str) -> Figure:
    """Held bytes by part (in units of `size` bytes), with the dense formula as a thin line."""
    figure, axes_list = figure_of(groups, 1.15)
    found: set[str] = set()
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        prepare(axes, title, members)
        dense = next((value for drawn in members for value in drawn.line.values("dense_bytes")), None)
        if dense is not None:
            axes.axvline(dense / size, color=INK, linewidth=0.7, zorder=1)
        for y, drawn in enumerate(members):
            held = drawn.line.value("held_bytes") or 0
            parts = {part: drawn.line.value(f"held_bytes.{part}") or 0 for part in PARTS}
            parts["other"] = max(0, held - sum(parts.values()))
            left = 0.0
            for part, value in parts.items():
                if value > 1e-4 * held:
                    axes.barh(y, value / size, left=left, height=0.62, color=PARTS.get(part, OTHER))
                    left += value / size
                    found.add(part)
            number(axes, left, y, units.significant(held / size))
        finish(axes, f"held by the cache at {context_of(members)}, {unit}")
    handles: list[Patch | Line2D] = [
        Patch(color=PARTS.get(part, OTHER), label=part) for part in (*PARTS, "other") if part in found
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


def figure_of(groups: dict[str, list[Drawn]], frame: float) -> tuple[Figure, list[Axes]]:
    most = max(map(len, groups.values()))
    return panels.figure_of(len(groups), frame + most * (0.26 if most <= MOST_WIDE else 0.18), columns=1)


def prepare(axes: Axes, title: str, members: Sequence[Drawn]) -> None:
    axes.set_title(panels.fitted(title, WIDTH))
    axes.set_yticks(range(len(members)), [panels.shortened(drawn.label) for drawn in members])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def number(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=8)


def finish(axes: Axes, label: str) -> None:
    axes.margins(x=0.1, y=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)


def context_of(members: Sequence[Drawn]) -> str:
    return f"{members[0].line.row.context or 0:,} tokens of context"
