"""Perplexity against budget, one curve for each keep rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report.compare.comparison import lines_of
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Drawn
from kvbench.report.figures.perplexity_by_bytes import perplexity_bounds
from kvbench.report.figures.style import FAINT, Looks, styles
from kvbench.results.row import Row


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
        _panel(axes, members, looks, entries)
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
