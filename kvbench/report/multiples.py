"""Small multiples: a panel for each method on shared axes, its own curves in colour over everybody's in grey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.report.panels import fitted, plain_log
from kvbench.report.style import FAINT, INK, WIDTH, Looks, styles

GREY = "#DCDCDC"
MOST = 24  # panels: a page


@dataclass(frozen=True)
class Curve:
    """One curve. name: the method, which picks panel and colour; order: what sorts the curves of a panel."""

    name: str
    label: str
    order: float | None
    points: list[tuple[float, float]]
    formula: list[tuple[float, float]] = field(default_factory=list)  # what the points should lie on: a thin line


def small_multiples(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    looks: Looks | None = None,
    *,
    logarithmic: bool = False,
    zero: bool = False,
    ticks: Sequence[int] = (),
) -> Figure:
    """Panels in the order of the curves. zero: draw a line there. ticks: contexts, for the x axis."""
    names = list(dict.fromkeys(curve.name for curve in curves))[:MOST]
    looks = looks or styles(names)
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(WIDTH, 0.55 + 1.22 * rows), squeeze=False, sharex=True, sharey=True
    )
    flat = list(grid.flat)
    values = [y for curve in curves for _, y in curve.points]
    for axes, name in zip(flat, names, strict=False):
        for curve in curves:
            axes.plot(*zip(*curve.points, strict=True), color=GREY, linewidth=0.6, zorder=1)
        own = sorted((curve for curve in curves if curve.name == name), key=lambda curve: curve.order or 0)
        for rank, curve in enumerate(own):
            colour = shade(looks[name].colour, (rank + 1) / len(own))
            few = len(curve.points) <= 16
            marker = {"marker": looks[name].marker, "markersize": 3} if few else {}
            axes.plot(*zip(*curve.points, strict=True), color=colour, linewidth=1.5, zorder=3, **marker)
            if curve.formula:
                axes.plot(*zip(*curve.formula, strict=True), color=INK, linewidth=0.6, zorder=4)
        axes.set_title(fitted(name, WIDTH / columns - 0.2, 8), fontsize=8, color=looks[name].colour, pad=3)
        _scale(axes, values, logarithmic=logarithmic, zero=zero)
        if ticks:
            _contexts(axes, ticks, columns)
    for index in range(len(names), len(flat)):
        flat[index].remove()
        flat[index - columns].tick_params(labelbottom=True)
    figure.supxlabel(x_label, fontsize=9)
    figure.supylabel(y_label, fontsize=9)
    return figure


def _scale(axes: Axes, values: Sequence[float], *, logarithmic: bool, zero: bool) -> None:
    if logarithmic and max(values) < 20 * min(values):
        plain_log(axes, "y", values, most=3)
    elif logarithmic:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(plain_number)
    elif zero and max(map(abs, values)) > 1:  # a method that collapses must not flatten the others
        symmetric_log(axes, values, 0.1)
    if zero:
        axes.axhline(0, color=FAINT, linewidth=0.7, zorder=2)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(plain_number)


def _contexts(axes: Axes, ticks: Sequence[int], columns: int) -> None:
    """As many of the measured contexts as have room under a narrow panel, the longest always."""
    step = math.ceil(len(ticks) / max(2, 8 // columns))
    shown = sorted(ticks)[::-1][::step][::-1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{tick // 1024}k" if tick % 1024 == 0 else f"{tick:,}" for tick in shown])
    axes.minorticks_off()


def symmetric_log(axes: Axes, values: Sequence[float], linear: float) -> None:
    """A y axis that is linear up to `linear` on both sides of zero and logarithmic beyond, with a few ticks."""
    last = math.ceil(math.log10(max(map(abs, values))))
    first = max(round(math.log10(linear)), last - 5)
    linear = 10.0**first
    axes.set_yscale("symlog", linthresh=linear)
    powers = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 3)))]
    axes.set_yticks([*(-power for power in powers if power <= -min(values)), 0, *powers])
    axes.set_ylim(min(0, min(values)) - linear / 3, max(values) * 1.2)
    axes.yaxis.set_major_formatter(plain_number)
    axes.minorticks_off()


def plain_number(value: float, _: float = 0) -> str:
    """A tick of a logarithmic axis: 0.001, 1, 100, 1e+06."""
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.0e}"


def shade(colour: str, strength: float) -> str:
    """From pale to the full colour at a strength of 1."""
    pale = 0.6 * (1 - strength)
    red, green, blue = (channel + (1 - channel) * pale for channel in to_rgb(colour))
    return to_hex((red, green, blue))
