"""Time per output token and held bytes against context; bars if only one context was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import lines_of
from kvbench.report.figures import layout
from kvbench.report.figures.bars import memory_bars, tpot_bars
from kvbench.report.figures.layout import Drawn
from kvbench.report.figures.method_panels import Curve, method_panels, shade
from kvbench.report.figures.point_labels import Point
from kvbench.report.figures.style import INK, Looks, styles
from kvbench.results.row import Row

CONTEXT = "context, tokens"
CROWD = 12
"""Curves that fit one panel; with more each method gets a panel."""


def tpot_by_context(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Median time per output token, with a thin line to the 90th percentile. None without latency rows."""
    groups = _groups(rows, "latency", "tpot_p50_ms")
    if not groups:
        return None
    looks = looks or _looks(groups)
    if _contexts(groups) == 1:
        return tpot_bars(groups, looks)
    if crowd := _crowd(groups):
        curves = _as_curves(crowd, "tpot_p50_ms", 1, _fitted)
        return _with_floor(method_panels(curves, CONTEXT, "time per output token, ms", looks, ticks=_ticks(crowd)))
    figure, axes_list = layout.figure_of(len(groups), _height(groups))
    entries = _draw(axes_list, groups, looks, "tpot_p50_ms", upper="tpot_p90_ms")
    for axes, members in zip(axes_list, groups.values(), strict=True):
        _draw_formulas(axes, members, 1, "tpot_p50_ms", _fitted)
    axes_list[0].set_ylabel("time per output token, ms")
    layout.legend_outside(figure, entries)
    return figure


def bytes_by_context(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Held bytes, with the formulas as thin lines. None without memory rows."""
    groups = _groups(rows, "memory", "held_bytes")
    if not groups:
        return None
    lines = [drawn.line for members in groups.values() for drawn in members]
    size, unit = number_text.byte_unit([value for line in lines for value in line.values("held_bytes")])
    if _contexts(groups) == 1:
        return memory_bars(groups, size, unit)
    looks = looks or _looks(groups)
    if crowd := _crowd(groups):
        curves = _as_curves(crowd, "held_bytes", size, _formula)
        return method_panels(
            curves, CONTEXT, f"held by the cache, {unit}", looks, logarithmic=True, ticks=_ticks(crowd)
        )
    figure, axes_list = layout.figure_of(len(groups), _height(groups))
    entries = _draw(axes_list, groups, looks, "held_bytes", size, proportional=True)
    panes = zip(axes_list, groups.values(), strict=True)
    for axes, members in zip(axes_list, groups.values(), strict=True):
        _draw_formulas(axes, members, size, "held_bytes", _formula)
    dense = [line for axes, members in panes if (line := _draw_dense(axes, members, size)) is not None]
    axes_list[0].set_ylabel(f"held by the cache, {unit}")
    layout.legend_outside(figure, entries + dense[:1])
    return figure


def _groups(rows: Sequence[Row], measure: str, metric: str) -> dict[str, list[Drawn]]:
    lines = lines_of(rows, measure)
    measured = [line for line in lines if (value := line.value(metric)) is not None and value >= 0]
    return layout.grouped([line for line in measured if line.row.context], join_architectures=True)


def _looks(groups: dict[str, list[Drawn]]) -> Looks:
    return styles(drawn.name for members in groups.values() for drawn in members)


def _crowd(groups: dict[str, list[Drawn]]) -> list[Drawn]:
    """The lines of the setting with most curves, if they are more than CROWD; else none."""
    fullest = max(groups.values(), key=lambda members: len({drawn.label for drawn in members}))
    return fullest if len({drawn.label for drawn in fullest}) > CROWD else []


def _as_curves(
    members: Sequence[Drawn], metric: str, size: float, formula: Callable[[Sequence[Drawn]], list[Point]]
) -> list[Curve]:
    by_label: dict[str, list[Drawn]] = {}
    for drawn in sorted(members, key=lambda drawn: drawn.line.row.context or 0):
        by_label.setdefault(drawn.label, []).append(drawn)
    curves = []
    for label, own in by_label.items():
        points = [(float(drawn.line.row.context or 0), (drawn.line.value(metric) or 0) / size) for drawn in own]
        thin = [(context, value / size) for context, value in formula(own)]
        curves.append(Curve(own[0].name, label, own[0].line.row.budget, points, thin))
    return sorted(curves, key=lambda curve: curve.name != "full")


def _draw_formulas(
    axes: Axes, members: Sequence[Drawn], size: float, metric: str, formula: Callable[[Sequence[Drawn]], list[Point]]
) -> None:
    """Thin lines that the curves should follow."""
    for curve in _as_curves(members, metric, size, formula):
        if len(curve.formula) > 1:
            axes.plot(*zip(*curve.formula, strict=True), color=INK, linewidth=0.5, zorder=4)


def _formula(members: Sequence[Drawn]) -> list[Point]:
    """Points of the method's own formula; of the full cache's where a folder has none."""
    for metric in ("analytic_bytes", "dense_bytes"):
        known = [(float(drawn.line.row.context or 0), drawn.line.value(metric)) for drawn in members]
        points = [(context, value) for context, value in known if value is not None]
        if points:
            return points
    return []


def _fitted(members: Sequence[Drawn]) -> list[Point]:
    """Points of the straight line with slope `slope_ms_per_1k` through the mean of the medians."""
    slope = members[0].line.value("slope_ms_per_1k")
    known = [(float(drawn.line.row.context or 0), drawn.line.value("tpot_p50_ms") or 0) for drawn in members]
    if slope is None or len(known) < 2:
        return []
    middle = sum(context for context, _ in known) / len(known)
    level = sum(value for _, value in known) / len(known)
    return [(context, level + slope * (context - middle) / 1000) for context, _ in known]


def _with_floor(figure: Figure) -> Figure:
    axes = figure.axes[0]  # the others share its scale
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)
    return figure


def _ticks(members: Sequence[Drawn]) -> list[int]:
    return sorted({drawn.line.row.context or 0 for drawn in members})


def _contexts(groups: dict[str, list[Drawn]]) -> int:
    return len({drawn.line.row.context for members in groups.values() for drawn in members})


def _height(groups: dict[str, list[Drawn]]) -> float:
    """Inches, enough for the legend."""
    return max(3.2, 0.4 + 0.18 * len({drawn.label for members in groups.values() for drawn in members}))


def _draw(
    axes_list: Sequence[Axes],
    groups: dict[str, list[Drawn]],
    looks: Looks,
    metric: str,
    size: float = 1,
    upper: str | None = None,
    proportional: bool = False,
) -> list[Line2D]:
    """Draw one curve for each label in each panel. Returns legend entries in the order in which the curves end.

    upper: metric at which a thin vertical line ends. proportional: with a logarithmic x axis the y axis is logarithmic
    too, so that bytes proportional to context stay a straight line.
    """
    entries: dict[str, tuple[float, Line2D]] = {}
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        axes.set_title(layout.fitted(title, layout.width(len(groups))))
        curves = _curves(members, metric, size)
        markers, shades = _nested(curves), _shades(curves, looks)
        contexts = [drawn.line.row.context or 0 for drawn in members]
        logarithmic = layout.context_axis(axes, contexts, len(groups)) and proportional
        for drawn in members:
            low, high = drawn.line.value(metric), drawn.line.value(upper) if upper else None
            if low is not None and high is not None:
                at = drawn.line.row.context or 0
                axes.plot([at, at], [low, high], color=looks[drawn.name].colour, linewidth=1, zorder=2)
        for label, (name, points) in curves.items():
            look = looks[name].line() | {"color": shades[label], "markerfacecolor": shades[label]}
            axes.plot(*zip(*points, strict=True), **look | {"markersize": markers[name]}, zorder=3)
            entries.setdefault(label, (points[-1][1], Line2D([], [], label=label, **look)))
        values = [value for _, points in curves.values() for _, value in points]
        if logarithmic and min(values) > 0:
            layout.plain_log(axes, "y", values)
            axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
        else:
            axes.set_ylim(bottom=0)
    return [entry for _, entry in sorted(entries.values(), key=lambda item: -item[0])]


def _curves(members: Sequence[Drawn], metric: str, size: float) -> dict[str, tuple[str, list[Point]]]:
    """For each label its display name and its points (context, value), by ascending context."""
    curves: dict[str, tuple[str, list[Point]]] = {}
    for drawn in sorted(members, key=lambda drawn: drawn.line.row.context or 0):
        value = drawn.line.value(metric)
        if value is not None:
            point = (drawn.line.row.context or 0, value / size)
            curves.setdefault(drawn.label, (drawn.name, []))[1].append(point)
    return curves


def _nested(curves: dict[str, tuple[str, list[Point]]]) -> dict[str, float]:
    """Marker sizes by name: where curves end at one point, those drawn first have larger markers and show as rings."""
    ends: dict[str, list[float]] = {}
    for name, points in curves.values():
        ends.setdefault(name, []).append(points[-1][1])
    names = list(ends)
    sizes = {}
    for index, name in enumerate(names):
        later = [value for other in names[index + 1 :] for value in ends[other]]
        covered = sum(math.isclose(end, value, rel_tol=0.02) for end in ends[name][:1] for value in later)
        sizes[name] = 4.5 + 2 * min(covered, 3)
    return sizes


def _shades(curves: dict[str, tuple[str, list[Point]]], looks: Looks) -> dict[str, str]:
    """One colour for each name; its curves from pale (the lowest) to full colour."""
    shades = {}
    for name, look in looks.items():
        family = [label for label, (other, _) in curves.items() if other == name]
        family.sort(key=lambda label: curves[label][1][-1][1])
        for rank, label in enumerate(family):
            shades[label] = shade(look.colour, (rank + 1) / len(family))
    return shades


def _draw_dense(axes: Axes, members: Sequence[Drawn], size: float) -> Line2D | None:
    known = {drawn.line.row.context or 0: drawn.line.value("dense_bytes") for drawn in members}
    points = sorted((float(context), value / size) for context, value in known.items() if value is not None)
    if not points:
        return None
    (first, low), (last, high) = points[0], points[-1]
    if math.isclose(low * last, high * first, rel_tol=1e-3):
        # Proportional to context: drawn to the edges of the panel, so that it is visible where `full` lies on it.
        left, right, bounds = *axes.get_xlim(), axes.get_ylim()
        points = [(left, low * left / first), *points, (right, high * right / last)]
        axes.set_xlim(left, right)
        axes.set_ylim(bounds)
    (line,) = axes.plot(*zip(*points, strict=True), color=INK, linewidth=0.7, zorder=1, label="formula")
    return line
