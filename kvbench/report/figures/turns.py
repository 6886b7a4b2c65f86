"""Hits by turn: one panel for each method, the first question after and before compression."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.report.compare.comparison import Line, config_of, lines_of
from kvbench.report.compare.names import labels
from kvbench.report.compare.number_text import percent
from kvbench.report.figures.layout import ONE_SETTING, Plot, titled
from kvbench.report.figures.method_panels import Curve, counted, method_panels
from kvbench.results.row import Row

BY_TURN = "hit_rate_at"
TIMES = {"after": 0.0, "before": 1.0}
"""Order of the times of the first question, from pale to full colour."""
MOST_SAID = 6


def turns(rows: Sequence[Row]) -> Plot | None:
    """Hit rate by turn, for the task, mode and setting with most methods. None without two turns."""
    lines = [line for line in lines_of(rows, "turns") if len(_by_turn(line)) > 1]
    if not lines:
        return None
    most = Counter(_setting(line) for line in lines).most_common(1)[0][0]
    here = [line for line in lines if _setting(line) == most]
    names = labels([line.row for line in here])
    curves = []
    for line in here:
        points = [(float(turn), row.value) for turn, row in sorted(_by_turn(line).items()) if row.value is not None]
        time = line.row.question or "after"
        if points:
            curves.append(Curve(line.row, f"{names[config_of(line.row)]} {time}", TIMES.get(time), points))
    if not curves:
        return None
    first = here[0].row
    figure = method_panels(curves, f"turn ({(first.protocol or '?').replace('_', ' ').replace('/', ', ')})", "hit rate")
    axes = figure.axes[0]  # the others share its scale
    axes.set_ylim(-0.05, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    ends = [f"{curve.label} {percent(curve.points[0][1])} to {percent(curve.points[-1][1])}" for curve in curves]
    says = f"Hit rate from the first to the last turn, {counted(curves, 'curve')}: {', '.join(ends[:MOST_SAID])}."
    return Plot(titled(figure, first, [line.row for line in lines], "question"), says)


def _by_turn(line: Line) -> dict[int, Row]:
    return next((found for (metric, _), found in line.curves.items() if metric == BY_TURN), {})


def _setting(line: Line) -> tuple[object, ...]:
    return (*(getattr(line.row, name) for name in ONE_SETTING if name != "question"), line.row.protocol)
