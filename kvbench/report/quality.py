"""Quality against bytes: a panel for each quality measure, and the front of what no other method beats in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report import panels, units
from kvbench.report.candidates import Candidate, Group, groups_of, setting_of
from kvbench.report.multiples import plain_number, symmetric_log
from kvbench.report.names import display_name
from kvbench.report.style import FAINT, Looks, styles
from kvbench.results.row import Row

# metric, axis label, which end is good
MEASURES = (
    ("nll_minus_full", "NLL above full, nats", "low"),
    ("kl", "KL, nats", "low"),
    ("top1", "top-1 agreement", "high"),
    ("hit_rate", "needles found", "high"),
)
SHARES = ("top1", "hit_rate")
MOST_GROUPS = 3
STEEP = 0.3  # nats: with a loss above it the axis is logarithmic beyond 0.01, so that small ones can be told apart


@dataclass(frozen=True)
class Spot:
    """One method in one panel."""

    name: str
    held: float
    value: float
    low: float
    high: float


def quality_bytes(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Panels of quality against bytes a sequence. None unless two methods have two quality measures and bytes."""
    found: list[tuple[str, str, str, str, list[Spot]]] = []
    groups = groups_of(rows)
    for group in groups[:MOST_GROUPS]:
        title = setting_of(group, groups) if len(groups) > 1 else ""
        for metric, label, good in MEASURES:
            spots = _spots(group, metric)
            if len({spot.name for spot in spots}) > 1:
                found.append((metric, label, good, title, spots))
    columns = max((sum(title == other for *_, other, _ in found) for *_, title, _ in found), default=0)
    if len({metric for metric, *_ in found}) < 2:
        return None
    looks = looks or styles(spot.name for *_, spots in found for spot in spots)
    columns = columns if len(found) > columns > 2 else 2  # of several settings each has a row
    figure, axes_list = panels.figure_of(len(found), 2.5 if columns == 2 else 2.1, columns)
    for axes, (metric, label, good, title, spots) in zip(axes_list, found, strict=True):
        axes.set_title(panels.fitted(title, panels.width(len(found), columns)))
        _panel(axes, spots, looks, good, logarithmic=metric == "kl")
        axes.set_ylabel(label)
    names = list(dict.fromkeys(spot.name for *_, spots in found for spot in spots))
    panels.legend_below(figure, [Line2D([], [], label=name, **looks[name].line()) for name in names])
    return figure


def _spots(group: Group, metric: str) -> list[Spot]:
    members = [*([group.baseline] if group.baseline is not None else []), *group.members]
    return [spot for member in members if (spot := _spot(member, metric)) is not None]


def _spot(member: Candidate, metric: str) -> Spot | None:
    row, held = member.numbers.get(metric), member.held
    if row is None or row.value is None or not math.isfinite(row.value) or held is None or held <= 0:
        return None
    if metric in SHARES and not 0 <= row.value <= 1:
        return None
    low = row.value if row.low is None else row.low
    high = row.value if row.high is None else row.high
    return Spot(display_name(member.row), held, row.value, low, high)


def _panel(axes: Axes, spots: Sequence[Spot], looks: Looks, good: str, *, logarithmic: bool) -> None:
    size, unit = units.byte_unit([spot.held for spot in spots])
    every = [spot.held / size for spot in spots]  # the same axis in every panel, whoever has no place in this one
    values = [spot.value for spot in spots if spot.value > 0]
    logarithmic = logarithmic and bool(values)  # while all are zero, equal to the full cache, a line will do
    if logarithmic:  # what is not above zero has no place on it, the full cache least of all
        spots = [spot for spot in spots if spot.value > 0]
    if max(every) / min(every) > 3:
        panels.plain_log(axes, "x", every, most=6)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain_number)
        axes.minorticks_off()
    elif good == "low" and values and max(values) > STEEP:
        symmetric_log(axes, [bound for spot in spots for bound in (spot.low, spot.value, spot.high)], 0.01)
    for name in dict.fromkeys(spot.name for spot in spots):
        members = sorted((spot for spot in spots if spot.name == name), key=lambda spot: spot.held)
        look = looks[name]
        for spot in members:
            low = max(spot.low, 1e-12) if logarithmic else spot.low
            axes.plot([spot.held / size] * 2, [low, spot.high], color=look.colour, linewidth=0.8, alpha=0.6, zorder=2)
        x, y = [spot.held / size for spot in members], [spot.value for spot in members]
        axes.plot(x, y, **look.line() | {"linewidth": 0.9, "markersize": 5}, zorder=3)
    front = pareto_front([(spot.held / size, spot.value) for spot in spots], good)
    panels.draw_front(axes, front)
    if good == "high":
        axes.set_ylim(top=1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.margins(0.1)
    axes.update_datalim([(held, axes.dataLim.y0) for held in (min(every), max(every))], updatey=False)
    axes.autoscale_view()
    axes.set_xlabel(f"held, {unit} per sequence")
    axes.axhline(1 if good == "high" else 0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)


def pareto_front(points: Sequence[tuple[float, float]], good: str = "low") -> list[tuple[float, float]]:
    """The points for which no other is as small and better, or smaller and as good, by ascending size."""
    sign = 1 if good == "low" else -1
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not front or sign * y < sign * front[-1][1]:
            front.append((x, y))
    return front
