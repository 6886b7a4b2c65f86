"""Time per output token and held bytes against context: one panel for each method, in the setting with most methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import lines_of
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Drawn, Plot, titled
from kvbench.report.figures.method_panels import Curve, counted, extremes, method_panels
from kvbench.report.figures.point_labels import Point
from kvbench.results.row import Row

CONTEXT = "context, tokens"


def tpot_by_context(rows: Sequence[Row]) -> Plot | None:
    """Median time per output token, with the fitted slope as a thin line. None without two contexts."""
    members = _fullest(rows, "latency", "tpot_p50_ms")
    if not members:
        return None
    curves = _as_curves(members, "tpot_p50_ms", 1, _fitted)
    figure = method_panels(curves, CONTEXT, "time per output token, ms", ticks=_ticks(members))
    axes = figure.axes[0]  # the others share its scale
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)
    says = f"Time per output token at {_ticks(members)[-1]:,} tokens: {_ends(curves, number_text.significant, 'ms')}."
    return Plot(titled(figure, members[0].line.row, rows, "context"), says)


def bytes_by_context(rows: Sequence[Row]) -> Plot | None:
    """Held bytes, with the formulas as thin lines. None without two contexts."""
    members = _fullest(rows, "memory", "held_bytes")
    if not members:
        return None
    size, unit = number_text.byte_unit([value for drawn in members for value in drawn.line.values("held_bytes")])
    curves = _as_curves(members, "held_bytes", size, _formula)
    positive = all(y > 0 for curve in curves for _, y in curve.points)
    label = f"held by the cache, {unit}"
    figure = method_panels(curves, CONTEXT, label, logarithmic=positive, ticks=_ticks(members))
    says = f"Held bytes at {_ticks(members)[-1]:,} tokens: {_ends(curves, number_text.significant, unit)}."
    return Plot(titled(figure, members[0].line.row, rows, "context"), says)


def _fullest(rows: Sequence[Row], measure: str, metric: str) -> list[Drawn]:
    """The lines of the setting with most methods among those with two contexts or more."""
    lines = lines_of(rows, measure)
    measured = [line for line in lines if (value := line.value(metric)) is not None and value >= 0 and line.row.context]
    groups = [members for members in layout.grouped(measured).values() if len(_ticks(members)) > 1]
    return max(groups, key=lambda members: len({drawn.label for drawn in members}), default=[])


def _ends(curves: Sequence[Curve], form: Callable[[float], str], unit: str) -> str:
    """The full cache's number at the longest context of all, then the lowest and the highest."""
    last = max(x for curve in curves for x, _ in curve.points)
    ends = {curve.label: curve.points[-1][1] for curve in curves if curve.points[-1][0] == last}
    full = [f"full {form(ends.pop('full'))} {unit}"] if "full" in ends and len(ends) > 1 else []
    return ", ".join([*full, f"of {counted(ends, 'method')} {extremes(ends, form, unit)}"])


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
        curves.append(Curve(own[0].line.row, label, own[0].line.row.budget, points, thin))
    return sorted(curves, key=lambda curve: curve.name != "full")


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


def _ticks(members: Sequence[Drawn]) -> list[int]:
    return sorted({drawn.line.row.context or 0 for drawn in members})
