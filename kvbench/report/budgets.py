"""Perplexity against budget: what every kept token is worth, a curve a keep rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report import panels
from kvbench.report.lines import lines_of
from kvbench.report.panels import Drawn
from kvbench.report.pareto import bounds_of
from kvbench.report.style import FAINT, Looks, styles
from kvbench.results.row import Row

SETTING = ("model", "dataset", "context", "dtype", "device")


def perplexity_budget(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """One panel a setting. None unless some method was measured at two budgets."""
    lines = [line for line in lines_of(rows, "perplexity") if _finite(line.value("ppl"))]
    groups = {title: members for title, members in panels.grouped(lines, SETTING).items() if _swept(members)}
    if not groups:
        return None
    looks = looks or styles(drawn.name for members in groups.values() for drawn in members)
    figure, axes_list = panels.figure_of(len(groups), 3.0)
    entries: dict[str, Line2D] = {}
    for axes, (title, members) in zip(axes_list, groups.items(), strict=True):
        axes.set_title(panels.fitted(title, panels.width(len(groups))))
        _panel(axes, members, looks, entries)
    axes_list[0].set_ylabel("perplexity")
    panels.legend_outside(figure, list(entries.values()))
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


def _panel(axes: Axes, members: Sequence[Drawn], looks: Looks, entries: dict[str, Line2D]) -> None:
    base = next((drawn.line.value("ppl") for drawn in members if drawn.line.baseline), None)
    if base is not None:
        axes.axhline(base, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    budgets, bounds, swept = set(), [], _swept(members)
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for drawn in members:
        row = drawn.line.get("ppl")
        if row is None or row.value is None or row.budget is None or drawn.name not in swept:
            continue
        low, high = bounds_of(drawn.line)
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
        panels.plain_log(axes, "y", bounds)
    ticks = sorted(budgets)
    axes.set_xticks(ticks, [f"{budget:,.0f}" if budget >= 1 else f"{100 * budget:g}%" for budget in ticks])
    axes.minorticks_off()
    axes.set_xlabel("budget, tokens kept per KV head" if min(ticks) >= 1 else "budget, share of the prompt")


def _shifts(count: int) -> list[float]:
    """Factors that set the curves a little apart, so that their intervals can be told from each other."""
    return [1.018 ** (index - (count - 1) / 2) for index in range(count)]
