"""How near each method's step comes to what the memory can deliver: one bar a method."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.report import bars, panels, units
from kvbench.report.lines import lines_of
from kvbench.report.panels import Drawn
from kvbench.report.style import INK, Looks, styles
from kvbench.results.row import Row

METRIC = "bandwidth_share"


def bandwidth_bars(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """At the longest context of each setting; None where no row tells the share."""
    lines = [line for line in lines_of(rows, "latency") if line.value(METRIC) is not None and line.row.context]
    groups = {title: _longest(members) for title, members in panels.grouped(lines).items()}
    if not groups:
        return None
    looks = looks or styles(drawn.name for members in groups.values() for drawn in members)
    figure, axes_list = bars.figure_of(groups, 0.9)
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        _panel(axes, title, members, looks)
    return figure


def _longest(members: Sequence[Drawn]) -> list[Drawn]:
    longest = max(drawn.line.row.context or 0 for drawn in members)
    return [drawn for drawn in members if drawn.line.row.context == longest]


def _panel(axes: Axes, title: str, members: Sequence[Drawn], looks: Looks) -> None:
    bars.prepare(axes, title, members)
    for y, drawn in enumerate(members):
        share = drawn.line.value(METRIC) or 0
        axes.barh(y, 100 * share, height=0.62, **looks[drawn.name].bar())
        bars.number(axes, 100 * share, y, units.percent(share))
    axes.axvline(100, color=INK, linewidth=0.7)
    bars.finish(axes, f"share of the memory's bandwidth, %, at {bars.context_of(members)}")
    axes.set_xlim(right=max(112, axes.get_xlim()[1]))
