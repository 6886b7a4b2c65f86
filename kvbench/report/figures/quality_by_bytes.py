"""Quality against the bytes of the cache that was scored: a panel for each quality metric, with its Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report.compare import number_text
from kvbench.report.compare.methods import Group, MethodNumbers, group_name, groups_of
from kvbench.report.compare.names import display_name
from kvbench.report.compare.scored_bytes import axis_text, same_cache
from kvbench.report.figures import layout
from kvbench.report.figures.method_panels import plain_number, symmetric_log
from kvbench.report.figures.style import FAINT, Looks, styles
from kvbench.results.row import Row

METRICS = (
    ("nll_minus_full", "NLL above full, nats", "low"),
    ("kl", "KL, nats", "low"),
    ("top1", "top-1 agreement", "high"),
)
"""Metric, axis label, whether low or high is better."""
SHARES = ("top1",)
MOST_GROUPS = 3
STEEP = 0.3
"""Nats. With a larger loss the axis is logarithmic beyond 0.01, so that small losses differ visibly."""


@dataclass(frozen=True)
class QualityPoint:
    """One method in one panel. held: bytes of one sequence. low, high: the interval of value.

    quality, size: the rows of both numbers, which come from the same cache.
    """

    name: str
    held: float
    value: float
    low: float
    high: float
    quality: Row
    size: Row


def quality_by_bytes(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Panels of quality against bytes of one sequence. None unless two methods have two quality metrics and bytes."""
    found: list[tuple[str, str, str, str, list[QualityPoint]]] = []
    groups = groups_of(rows)
    for group in groups[:MOST_GROUPS]:
        title = group_name(group, groups) if len(groups) > 1 else ""
        for metric, label, good in METRICS:
            points = points_of(group, metric)
            if len({point.name for point in points}) > 1:
                found.append((metric, label, good, title, points))
    columns = max((sum(title == other for *_, other, _ in found) for *_, title, _ in found), default=0)
    if len({metric for metric, *_ in found}) < 2:
        return None
    looks = looks or styles(point.name for *_, points in found for point in points)
    columns = columns if len(found) > columns > 2 else 2  # each of several settings has a row of panels
    figure, axes_list = layout.figure_of(len(found), 2.5 if columns == 2 else 2.1, columns)
    for axes, (metric, label, good, title, points) in zip(axes_list, found, strict=True):
        axes.set_title(layout.fitted(title, layout.width(len(found), columns)))
        _panel(axes, points, looks, good, logarithmic=metric == "kl")
        axes.set_ylabel(label)
    names = list(dict.fromkeys(point.name for *_, points in found for point in points))
    layout.legend_below(figure, [Line2D([], [], label=name, **looks[name].line()) for name in names])
    return figure


def points_of(group: Group, metric: str) -> list[QualityPoint]:
    """The methods of a group that have this metric and the bytes of the same cache."""
    return [point for member in group.everyone if (point := _point(member, metric)) is not None]


def _point(member: MethodNumbers, metric: str) -> QualityPoint | None:
    row, size, held = member.numbers.get(metric), member.scored, member.held
    if row is None or row.value is None or not math.isfinite(row.value) or held is None or held <= 0:
        return None
    if size is None or not same_cache(row, size):
        return None
    if metric in SHARES and not 0 <= row.value <= 1:
        return None
    low = row.value if row.low is None else row.low
    high = row.value if row.high is None else row.high
    return QualityPoint(display_name(member.row), held, row.value, low, high, row, size)


def _panel(axes: Axes, points: Sequence[QualityPoint], looks: Looks, good: str, *, logarithmic: bool) -> None:
    size, unit = number_text.byte_unit([point.held for point in points])
    every = [point.held / size for point in points]  # of all methods, so that every panel has the same axis
    values = [point.value for point in points if point.value > 0]
    logarithmic = logarithmic and bool(values)  # without a value above zero the axis stays linear
    if logarithmic:  # values of zero, as the full cache's, cannot be drawn on it
        points = [point for point in points if point.value > 0]
    if max(every) / min(every) > 3:
        layout.plain_log(axes, "x", every, most=6)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain_number)
        axes.minorticks_off()
    elif good == "low" and values and max(values) > STEEP:
        symmetric_log(axes, [bound for point in points for bound in (point.low, point.value, point.high)], 0.01)
    for name in dict.fromkeys(point.name for point in points):
        members = sorted((point for point in points if point.name == name), key=lambda point: point.held)
        look = looks[name]
        for point in members:
            low = max(point.low, 1e-12) if logarithmic else point.low
            axes.plot([point.held / size] * 2, [low, point.high], color=look.colour, linewidth=0.8, alpha=0.6, zorder=2)
        x, y = [point.held / size for point in members], [point.value for point in members]
        axes.plot(x, y, **look.line() | {"linewidth": 0.9, "markersize": 5}, zorder=3)
    front = pareto_front([(point.held / size, point.value) for point in points], good)
    layout.draw_front(axes, front)
    if good == "high":
        axes.set_ylim(top=1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.margins(0.1)
    axes.update_datalim([(held, axes.dataLim.y0) for held in (min(every), max(every))], updatey=False)
    axes.autoscale_view()
    axes.set_xlabel(axis_text((point.size for point in points), unit))
    axes.axhline(1 if good == "high" else 0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)


def pareto_front(points: Sequence[tuple[float, float]], good: str = "low") -> list[tuple[float, float]]:
    """The points that no other point beats: none is as small and better, or smaller and as good. By ascending size."""
    sign = 1 if good == "low" else -1
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not front or sign * y < sign * front[-1][1]:
            front.append((x, y))
    return front
