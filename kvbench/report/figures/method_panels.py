"""Figures with one panel for each method on shared axes: KL by position, loss by window, and curves by context."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.report.compare.comparison import Line, config_of, lines_of
from kvbench.report.compare.names import display_name, labels
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.figures.layout import fitted, plain_log, setting_of, titled
from kvbench.report.figures.style import FAINT, INK, WIDTH, Looks, styles
from kvbench.results.row import Row

GREY = "#DCDCDC"
MOST = 24
"""Panels that fit a page."""
FEWEST_WINDOWS = 2
KL_BY_POSITION = "kl_at"


@dataclass(frozen=True)
class Curve:
    """One curve. name: the method, which chooses panel and colour. order: sorts the curves of a panel, pale to full.

    formula: points of a thin line on which the curve should lie.
    """

    name: str
    label: str
    order: float | None
    points: list[tuple[float, float]]
    formula: list[tuple[float, float]] = field(default_factory=list)


def method_panels(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    looks: Looks | None = None,
    *,
    logarithmic: bool = False,
    zero: bool = False,
    ticks: Sequence[int] = (),
) -> Figure:
    """One panel for each method, in the order of the curves, its own curves in colour and all others in grey.

    zero: draw a line at zero. ticks: contexts for a logarithmic x axis.
    """
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
    elif zero and max(map(abs, values)) > 1:  # one very large loss must not flatten the other curves
        symmetric_log(axes, values, 0.1)
    if zero:
        axes.axhline(0, color=FAINT, linewidth=0.7, zorder=2)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(plain_number)


def _contexts(axes: Axes, ticks: Sequence[int], columns: int) -> None:
    """A logarithmic x axis with as many of the measured contexts as have room, the longest always."""
    step = math.ceil(len(ticks) / max(2, 8 // columns))
    shown = sorted(ticks)[::-1][::step][::-1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{tick // 1024}k" if tick % 1024 == 0 else f"{tick:,}" for tick in shown])
    axes.minorticks_off()


def symmetric_log(axes: Axes, values: Sequence[float], linear: float) -> None:
    """A y axis that is linear between -`linear` and `linear` and logarithmic beyond, with a few ticks."""
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
    """The colour, paler the smaller `strength` is; unchanged at 1."""
    pale = 0.6 * (1 - strength)
    red, green, blue = (channel + (1 - channel) * pale for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def kl_by_position(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """KL against the full cache by position of the scored token, in the first setting that has it; None without."""
    lines = [line for line in lines_of(rows, "perplexity") if not line.baseline and _by_position(line)]
    if not lines:
        return None
    first = lines[0].row
    same = [line for line in lines if setting_of(line.row) == setting_of(first)]
    names = labels([line.row for line in same])
    curves = []
    for line in same:
        points = sorted(_by_position(line).items())
        values = [(float(position), row.value) for position, row in points if row.value is not None and row.value > 0]
        if values:
            curves.append(Curve(display_name(line.row), names[config_of(line.row)], line.row.budget, values))
    if not curves:
        return None
    figure = method_panels(curves, "position of the scored token", "KL, nats", looks, logarithmic=True)
    return titled(figure, first, [line.row for line in lines])


def _by_position(line: Line) -> dict[int, Row]:
    return next((found for (metric, _), found in line.curves.items() if metric == KL_BY_POSITION), {})


def loss_by_window(samples: Sequence[WindowSample], looks: Looks | None = None) -> Figure | None:
    """NLL above the full cache's of every window, sorted, in the setting with most windows; None without two windows.

    A small mean loss may hide a few windows with a large one.
    """
    settings = Counter(setting_of(sample.row) for sample in samples)
    if not settings:
        return None
    here = [sample for sample in samples if setting_of(sample.row) == settings.most_common(1)[0][0]]
    names = labels([sample.row for sample in here])
    found: dict[str, list[WindowSample]] = {}
    for sample in here:
        found.setdefault(names[config_of(sample.row)], []).append(sample)
    curves = []
    for label, members in found.items():
        values = sorted(sample.difference for sample in members)
        if len(values) >= FEWEST_WINDOWS:
            row = members[0].row
            curves.append(Curve(display_name(row), label, row.budget, [(i + 1.0, v) for i, v in enumerate(values)]))
    if not curves:
        return None
    figure = method_panels(curves, "window, sorted", "NLL above full, nats", looks, zero=True)
    return titled(figure, here[0].row, [sample.row for sample in samples])
