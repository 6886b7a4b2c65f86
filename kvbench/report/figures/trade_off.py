"""The main figures: loss of quality against x smaller than a full cache in 16 bits, one panel for each setting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import is_baseline, sees_future
from kvbench.report.compare.method_kinds import FAMILIES, family_of, series_of
from kvbench.report.compare.methods import Group, MethodNumbers, group_name, groups_of
from kvbench.report.compare.names import SEES_FUTURE, display_name
from kvbench.report.compare.sixteen_bit import DERIVED, times_sixteen_bit
from kvbench.report.compare.window_intervals import NO_INTERVALS, WindowIntervals
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Plot
from kvbench.report.figures.loss_axis import LossAxis, loss_axis
from kvbench.report.figures.point_labels import Label, Point, label_points
from kvbench.report.figures.style import COLOURS, FAINT, MARKERS, colour_of, mark_of
from kvbench.results.row import Row

MOST_GROUPS = 4
MOST_LABELS = 24
"""Methods with a label in one panel; the names of the others stand above it."""
TINY = 1e-6
"""Losses below it count as equal where the room for a label is judged."""
CLIPPED_SIZE = 7.5
"""Font size of the names of methods that are clipped or have no label."""
NO_BREAK = "\u00a0"


@dataclass(frozen=True)
class Metric:
    """A quality metric of a figure. better: `low` or `high`. label: of its axis. form: how a value is written."""

    name: str
    label: str
    better: str
    form: Callable[[float], str]


KL = Metric("kl", "KL to the full cache, nats", "low", number_text.small)
DIFFERENCE = Metric("nll_minus_full", "NLL minus the full cache's, nats", "low", number_text.signed)
TOP1 = Metric("top1", "top-1 agreement with the full cache", "high", number_text.percent)


@dataclass(frozen=True)
class TradeOff:
    """One method in one panel. smaller: x smaller than 16-bit. low, high: 95% interval of value over windows, if known.

    quality, size: the rows of both numbers, which come from the same cache.
    """

    label: str
    smaller: float
    value: float
    low: float
    high: float
    quality: Row
    size: Row


def trade_offs(group: Group, metric: Metric, intervals: WindowIntervals = NO_INTERVALS) -> list[TradeOff]:
    """The methods of a group that have the metric and the bytes of the same cache; random weights give none."""
    found = (_point(member, group, metric, intervals) for member in group.everyone)
    return [point for point in found if point is not None]


def _point(member: MethodNumbers, group: Group, metric: Metric, intervals: WindowIntervals) -> TradeOff | None:
    row = member.numbers.get(metric.name)
    if row is None or row.value is None or not math.isfinite(row.value):
        return None
    size = times_sixteen_bit(member, group, row)
    if size is None or size.value is None or (metric.better == "high" and not 0 <= row.value <= 1):
        return None
    own = intervals.of(row)
    low, high = own[:2] if own is not None and all(map(math.isfinite, own)) else (row.value, row.value)
    return TradeOff(member.label, size.value, row.value, low, high, row, size)


def front_of(points: Sequence[TradeOff], better: str = "low") -> list[TradeOff]:
    """The points that no other one beats, smallest cache first. A method that sees the future beats nobody."""
    sign = 1 if better == "low" else -1
    front: list[TradeOff] = []
    for point in sorted(points, key=lambda point: (-point.smaller, sign * point.value)):
        if not sees_future(point.quality) and (not front or sign * point.value < sign * front[-1].value):
            front.append(point)
    return front


def kl_by_size(rows: Sequence[Row], intervals: WindowIntervals = NO_INTERVALS) -> Plot | None:
    """KL to the full cache against x smaller than 16-bit. None unless two methods have both from one cache."""
    return trade_off_figure(rows, KL, intervals)


def difference_by_size(rows: Sequence[Row], intervals: WindowIntervals = NO_INTERVALS) -> Plot | None:
    """NLL minus the full cache's against x smaller than 16-bit. None unless two methods have both from one cache."""
    return trade_off_figure(rows, DIFFERENCE, intervals)


def top1_by_size(rows: Sequence[Row], intervals: WindowIntervals = NO_INTERVALS) -> Plot | None:
    """Top-1 agreement against x smaller than 16-bit. None unless two methods have both from one cache."""
    return trade_off_figure(rows, TOP1, intervals)


def trade_off_figure(rows: Sequence[Row], metric: Metric, intervals: WindowIntervals = NO_INTERVALS) -> Plot | None:
    """One panel for each model and device with two methods or more, at most MOST_GROUPS."""
    groups = groups_of(rows)
    found = [(group, points) for group in groups if len(points := trade_offs(group, metric, intervals)) > 1]
    found = found[:MOST_GROUPS]
    if not found:
        return None
    columns = 1 if len(found) == 1 else 2
    largest = max(len(points) for _, points in found)
    height = 3.4 if largest <= 10 else 4.9
    figure, axes_list = layout.figure_of(len(found), height, columns)
    _families_below(figure, [point.quality for _, points in found for point in points])
    says, waiting = [], []
    for axes, (group, points) in zip(axes_list, found, strict=True):
        title = group_name(group, groups) if len(groups) > 1 else ""
        axis = loss_axis(metric.better, [(p.value, p.low, p.high) for p in points], logarithmic=metric is KL)
        inside, beyond = _split(points, axis)
        unlabelled = crowded(inside, metric)
        _titles(axes, title, beyond, unlabelled, metric, axis, layout.width(len(found), columns))
        segments = _draw(axes, points, metric, axis)
        left_out = {id(point) for point in unlabelled}
        waiting.append((axes, [point for point in inside if id(point) not in left_out], segments, axis))
        says.append(_said(title, points, beyond, metric, axis))
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels must not move what they were placed around
    for axes, inside, segments, axis in waiting:
        _write_labels(figure, axes, inside, segments, metric, axis)
    return Plot(figure, " ".join(says))


def _split(points: Sequence[TradeOff], axis: LossAxis) -> tuple[list[TradeOff], list[TradeOff]]:
    """Points inside the axis, and those that stand clipped at its upper edge."""
    beyond = [point for point in points if axis.beyond(point.value)]
    return [point for point in points if not axis.beyond(point.value)], beyond


def crowded(points: Sequence[TradeOff], metric: Metric) -> list[TradeOff]:
    """The points that get no label where there are more than MOST_LABELS methods: those with the nearest neighbours.

    The front, the full cache and the bounds are always labelled.
    """
    series = _by_series(points)
    if len(series) <= MOST_LABELS:
        return []
    front = {id(point) for point in front_of(points, metric.better)}
    places = [[(math.log(point.smaller), math.log(max(abs(point.value), TINY))) for point in own] for own in series]

    def room(i: int) -> float:
        others = [other for j, place in enumerate(places) if j != i for other in place]
        return min(math.dist(here, other) for here in places[i] for other in others)

    named = {
        i
        for i, own in enumerate(series)
        if any(id(point) in front or family_of(point.quality) == "reference" for point in own)
    }
    rest = sorted((i for i in range(len(series)) if i not in named), key=room, reverse=True)
    return [point for i in rest[max(0, MOST_LABELS - len(named)) :] for point in series[i]]


def _titles(
    axes: Axes,
    title: str,
    beyond: Sequence[TradeOff],
    unlabelled: Sequence[TradeOff],
    metric: Metric,
    axis: LossAxis,
    inches: float,
) -> None:
    """The setting, and below it with their values the clipped methods and those without a label."""
    lines = [layout.fitted(title, inches)] if title else []
    for words, points in ((f"beyond {axis.top:g} nats", beyond), ("without a label", unlabelled)):
        if points:
            lines.append(layout.wrapped(f"{words}: {_listed(points, metric)}", inches - 0.3, CLIPPED_SIZE))
    axes.set_title("\n".join(lines), fontsize=CLIPPED_SIZE if beyond or unlabelled else 9)


def _by_series(points: Sequence[TradeOff]) -> list[list[TradeOff]]:
    """The points of each method, whatever their budgets."""
    series: dict[tuple[object, ...], list[TradeOff]] = {}
    for point in points:
        series.setdefault(series_of(point.quality), []).append(point)
    return list(series.values())


def _listed(points: Sequence[TradeOff], metric: Metric) -> str:
    """`random 128 (1.3), 256 (0.96); knorm 128 (1.1)`: a method once, its budgets with their values."""
    parts = []
    for own in _by_series(points):
        first = own[0]
        texts = [f"{first.label} {metric.form(first.value)}"]
        texts += [f"{_budget(point)} {metric.form(point.value)}" for point in own[1:]]
        parts.append(", ".join(text.replace(" ", NO_BREAK) for text in texts))
    return "; ".join(parts)


def _budget(point: TradeOff) -> str:
    """The label without the method's name."""
    return point.label.removeprefix(display_name(point.quality)).strip() or point.label


def _families_below(figure: Figure, rows: Sequence[Row]) -> None:
    shown = {family_of(row) for row in rows}
    entries = [
        Line2D([], [], label=words, color=COLOURS[family], marker=MARKERS[family], linewidth=0.9)
        for family, words in FAMILIES.items()
        if family in shown
    ]
    if any(sees_future(row) for row in rows):
        grey = COLOURS["reference"]
        entries.append(Line2D([], [], label=SEES_FUTURE, color=grey, marker="o", markerfacecolor="white", linewidth=0))
    layout.legend_below(figure, entries)


def _draw(axes: Axes, points: Sequence[TradeOff], metric: Metric, axis: LossAxis) -> list[tuple[Point, Point]]:
    """Draw points, intervals and the front; returns the lines that no label may cover."""
    layout.plain_log(axes, "x", [point.smaller for point in points], most=8)
    axis.apply(axes)
    axes.margins(x=0.06)
    segments: list[tuple[Point, Point]] = []
    for own in _by_series(points):
        own.sort(key=lambda point: point.smaller)
        look = mark_of(own[0].quality) | {"markersize": 5, "clip_on": False}
        marks = [(point.smaller, axis.place(point.value)) for point in own]
        axes.plot(*zip(*marks, strict=True), linestyle="none", zorder=4, **look)
        curve = [(point.smaller, axis.place(point.value)) for point in own if not axis.beyond(point.value)]
        if len(curve) > 1:
            axes.plot(*zip(*curve, strict=True), color=look["color"], linewidth=0.9, zorder=3)
        segments += itertools.pairwise(curve)
        for point in own:
            ends = (point.smaller, axis.place(point.low)), (point.smaller, axis.place(point.high))
            if point.low < point.high:
                axes.plot(*zip(*ends, strict=True), color=colour_of(point.quality), linewidth=0.8, alpha=0.4, zorder=2)
    front = [(point.smaller, axis.place(point.value)) for point in front_of(points, metric.better)]
    if len(front) > 1:
        axes.step(*zip(*front, strict=True), where="post", color=FAINT, linewidth=0.8, zorder=1)
        for (x, y), (after, below) in itertools.pairwise(front):
            segments += [((x, y), (after, y)), ((after, y), (after, below))]
    if metric.better == "low":
        left, right = axes.get_xlim()
        segments.append(((left, axis.place(0)), (right, axis.place(0))))
    axes.set_ylabel(metric.label)
    axes.set_xlabel(_x_label([point.size for point in points]))
    return segments


def _x_label(sizes: Sequence[Row]) -> str:
    contexts = {row.context for row in sizes if row.context is not None}
    where = f" at context {min(contexts):,}" if len(contexts) == 1 else ""
    when = "after scoring" if any(row.metric == DERIVED for row in sizes) else "mean while scored,"
    return f"x smaller than a 16-bit full cache\n{when}{where}"


def _write_labels(
    figure: Figure,
    axes: Axes,
    points: Sequence[TradeOff],
    segments: Sequence[tuple[Point, Point]],
    metric: Metric,
    axis: LossAxis,
) -> None:
    """The name beside the loneliest point of each line, the budgets beside the others where there is room."""
    labels = []
    places = {id(point): (point.smaller, axis.place(point.value)) for point in points}
    seen = {key: axes.transData.transform(place) for key, place in places.items()}
    for own in _by_series(points):
        named = min(own, key=lambda point: sum(1 / (4 + math.dist(seen[id(point)], other)) for other in seen.values()))
        for point in own:
            # A hollow mark says that a method sees the future.
            text = (point.label if point is named else _budget(point)).removesuffix(f" ({SEES_FUTURE})")
            text = layout.shortened(text) if point is named else text
            text += f" ({metric.form(point.value)})" if axis.below(point.value) else ""
            labels.append(Label(places[id(point)], text, colour_of(point.quality), minor=point is not named))
    label_points(figure, axes, labels, segments)


def _said(title: str, points: Sequence[TradeOff], beyond: Sequence[TradeOff], metric: Metric, axis: LossAxis) -> str:
    front = [point for point in front_of(points, metric.better) if not is_baseline(point.quality)]
    named = ", ".join(f"{point.label} {metric.form(point.value)} at {point.smaller:.3g}x" for point in front[:8])
    where = f"{title}: " if title else ""
    unit = " in nats" if metric.better == "low" else ""
    text = f"{where}{len(points)} settings; on the front{unit}, smallest cache first: {named}."
    if not front:
        text = f"{where}{len(points)} settings, none but the full cache on the front."
    return text + (f" Beyond {axis.top:g} nats: {_listed(beyond, metric)}." if beyond else "")
