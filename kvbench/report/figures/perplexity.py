"""Perplexity against the bytes of the cache that was scored, and against the budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import Line, lines_of
from kvbench.report.compare.scored_bytes import axis_text, bytes_metric, rows_by_metric, same_cache, size_of
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Drawn
from kvbench.report.figures.point_labels import Label, Point, label_points
from kvbench.report.figures.quality_by_bytes import pareto_front
from kvbench.report.figures.style import FAINT, Looks, styles
from kvbench.results.row import Row

CROWD = 12
"""With more points than these a panel is made higher."""
MOST_NAMES = 14
"""Names that fit beside their points; more stand in a legend."""
WIDEST = 50.0
"""Nats. A wider interval is not drawn."""


@dataclass(frozen=True)
class PerplexityPoint:
    """One method. held: bytes of one sequence. low, high: the interval of ppl.

    quality, size: the rows of both numbers, which come from the same cache.
    """

    drawn: Drawn
    held: float
    ppl: float
    quality: Row
    size: Row
    low: float
    high: float


def perplexity_by_bytes(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Perplexity against bytes of one sequence, with the interval of the paired difference from the full cache.

    None unless both were measured.
    """
    groups = perplexity_points(rows)
    if not groups:
        return None
    looks = looks or styles(point.drawn.name for points in groups.values() for point in points)
    tall = max(map(len, groups.values())) > CROWD
    names = list(dict.fromkeys(point.drawn.name for points in groups.values() for point in points))
    named = len(names) <= MOST_NAMES
    figure, axes_list = layout.figure_of(len(groups), 4.8 if tall and named else 3.7 if len(groups) == 1 else 3.2)
    for axes, (title, points) in zip(axes_list, groups.items(), strict=True):
        axes.set_title(layout.fitted(title, layout.width(len(groups))))
        segments = _draw(axes, points, looks)
        if named:
            _write_labels(figure, axes, points, looks, segments)
    if not named:
        layout.legend_below(figure, [Line2D([], [], label=name, **looks[name].line()) for name in names])
    return figure


def perplexity_points(rows: Sequence[Row]) -> dict[str, list[PerplexityPoint]]:
    """By the title of their panel: methods with a perplexity and the bytes of the same cache, two or more a panel."""
    lines = [line for line in lines_of(rows, "perplexity") if line.value("ppl") is not None]
    groups: dict[str, list[PerplexityPoint]] = {}
    for title, members in layout.grouped(lines, by_context=True, any_batch=True).items():
        metric = bytes_metric(rows_by_metric(drawn.line) for drawn in members)
        points = [point for drawn in members if (point := _point(drawn, metric)) is not None]
        if len(points) > 1:
            groups[title] = points
    return groups


def perplexity_bounds(line: Line) -> tuple[float, float]:
    """Lower and upper bound of a perplexity, from the paired difference to the full cache where it was measured.

    The paired interval does not contain how much the windows of the text differ from each other.
    """
    value, paired, own = line.value("ppl") or 0.0, line.get("nll_minus_full"), line.get("ppl")
    if line.baseline:
        return value, value
    if paired is not None and None not in (paired.value, paired.low, paired.high):
        low, high = ((bound or 0.0) - (paired.value or 0.0) for bound in (paired.low, paired.high))
        if max(abs(low), abs(high)) < WIDEST:
            return value * math.exp(low), value * math.exp(high)
    if own is None or own.low is None or own.high is None:
        return value, value
    return own.low, own.high


def _point(drawn: Drawn, metric: str) -> PerplexityPoint | None:
    row, size = drawn.line.get("ppl"), drawn.line.get(metric)
    if row is None or row.value is None or not math.isfinite(row.value):
        return None
    held = size_of(size)
    if size is None or held is None or not same_cache(row, size):
        return None
    low, high = perplexity_bounds(drawn.line)
    return PerplexityPoint(drawn, held, row.value, row, size, low, high)


def _draw(axes: Axes, points: Sequence[PerplexityPoint], looks: Looks) -> list[tuple[Point, Point]]:
    """Draw points, intervals and front; returns the lines that no label may cover."""
    size, unit = number_text.byte_unit([point.held for point in points])
    held = [point.held / size for point in points]
    bounds = [point.low for point in points] + [point.high for point in points]
    if min(held) > 0 and max(held) / min(held) > 4:
        layout.plain_log(axes, "x", held)
    if min(bounds) > 0 and max(bounds) / min(bounds) > 3:
        layout.plain_log(axes, "y", bounds)
    axes.margins(0.12, 0.1)
    segments: list[tuple[Point, Point]] = []
    base = next((point for point in points if point.drawn.line.baseline), None)
    if base is not None:
        axes.axhline(base.ppl, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for name, members in _by_name(points).items():
        curve = sorted(((point.held / size, point.ppl) for point in members), key=lambda point: point[0])
        axes.plot(*zip(*curve, strict=True), **looks[name].line(), zorder=3)
        segments += itertools.pairwise(curve)
        for point in members:
            x = point.held / size
            axes.plot([x, x], [point.low, point.high], color=looks[name].colour, linewidth=1, zorder=2)
            segments.append(((x, point.low), (x, point.high)))
    front = pareto_front([(point.held / size, point.ppl) for point in points])
    layout.draw_front(axes, front)
    for (x, y), (after, below) in itertools.pairwise(front):
        segments += [((x, y), (after, y)), ((after, y), (after, below))]
    axes.set_xlabel(axis_text((point.size for point in points), unit))
    axes.set_ylabel("perplexity")
    if base is not None:
        left, right = axes.get_xlim()
        segments.append(((left, base.ppl), (right, base.ppl)))
    return segments


def _by_name(points: Sequence[PerplexityPoint]) -> dict[str, list[PerplexityPoint]]:
    names: dict[str, list[PerplexityPoint]] = {}
    for point in points:
        names.setdefault(point.drawn.name, []).append(point)
    return names


def _write_labels(
    figure: Figure, axes: Axes, points: Sequence[PerplexityPoint], looks: Looks, segments: Sequence[tuple[Point, Point]]
) -> None:
    """Labels at the points. Of several budgets the largest cache carries the name, the others only their knob."""
    size, _ = number_text.byte_unit([point.held for point in points])
    labels = []
    for point in points:
        family = [other for other in points if other.drawn.name == point.drawn.name]
        minor = point is not max(family, key=lambda other: other.held)
        text = point.drawn.label.removeprefix(point.drawn.name).strip() if minor else point.drawn.label
        labels.append(
            Label((point.held / size, point.ppl), layout.shortened(text), looks[point.drawn.name].colour, minor)
        )
    label_points(figure, axes, labels, segments)


def perplexity_by_budget(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """One panel for each setting. None unless a method was measured at two budgets."""
    lines = [line for line in lines_of(rows, "perplexity") if _finite(line.value("ppl"))]
    settings = layout.grouped(lines, by_context=True, any_batch=True)
    groups = {title: members for title, members in settings.items() if _swept(members)}
    if not groups:
        return None
    looks = looks or styles(drawn.name for members in groups.values() for drawn in members)
    figure, axes_list = layout.figure_of(len(groups), 3.0)
    entries: dict[str, Line2D] = {}
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        axes.set_title(layout.fitted(title, layout.width(len(groups))))
        _budget_panel(axes, members, looks, entries)
    axes_list[0].set_ylabel("perplexity")
    layout.legend_outside(figure, list(entries.values()))
    return figure


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _swept(members: Sequence[Drawn]) -> set[str]:
    """Names that were measured at two budgets or more."""
    budgets: dict[str, set[float]] = {}
    for drawn in members:
        if drawn.line.row.budget is not None:
            budgets.setdefault(drawn.name, set()).add(drawn.line.row.budget)
    return {name for name, known in budgets.items() if len(known) > 1}


def _budget_panel(axes: Axes, members: Sequence[Drawn], looks: Looks, entries: dict[str, Line2D]) -> None:
    base = next((drawn.line.value("ppl") for drawn in members if drawn.line.baseline), None)
    if base is not None:
        axes.axhline(base, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    budgets, bounds, swept = set(), [], _swept(members)
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for drawn in members:
        row = drawn.line.get("ppl")
        if row is None or row.value is None or row.budget is None or drawn.name not in swept:
            continue
        low, high = perplexity_bounds(drawn.line)
        curves.setdefault(drawn.name, []).append((row.budget, row.value, low, high))
        budgets.add(row.budget)
        bounds += [low, high]
    shifts = _shifts(len(curves))
    axes.set_xscale("log", base=2)
    for (name, points), shift in zip(curves.items(), shifts, strict=True):
        points.sort()
        x = [budget * shift for budget, *_ in points]
        axes.plot(x, [value for _, value, *_ in points], **looks[name].line(), zorder=3)
        lows, highs = [low for *_, low, _ in points], [high for *_, high in points]
        axes.vlines(x, lows, highs, color=looks[name].colour, linewidth=1)
        entries.setdefault(name, Line2D([], [], label=name, **looks[name].line()))
    if min(bounds) > 0 and max(bounds) / min(bounds) > 2:
        layout.plain_log(axes, "y", bounds)
    ticks = sorted(budgets)
    axes.set_xticks(ticks, [f"{budget:,.0f}" if budget >= 1 else f"{100 * budget:g}%" for budget in ticks])
    axes.minorticks_off()
    axes.set_xlabel("budget, tokens kept per KV head" if min(ticks) >= 1 else "budget, share of the prompt")


def _shifts(count: int) -> list[float]:
    """Factors that shift the curves sideways, so that their intervals do not cover each other."""
    return [1.018 ** (index - (count - 1) / 2) for index in range(count)]
