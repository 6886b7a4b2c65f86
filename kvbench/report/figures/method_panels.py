"""Figures with one panel for each method on shared axes: KL by position, loss by window, perplexity by budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.report.compare.comparison import Line, config_of, decode_of, lines_of
from kvbench.report.compare.method_kinds import family_of, series_of
from kvbench.report.compare.names import display_name, labels
from kvbench.report.compare.number_text import signed, significant, small
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.figures.layout import Plot, fitted, plain_log, setting_of, titled
from kvbench.report.figures.style import FAINT, INK, MARKERS, WIDTH, colour_of
from kvbench.results.row import Row

GREY = "#DCDCDC"
MOST = 24
"""Panels that fit a page."""
FEWEST_WINDOWS = 2
KL_BY_POSITION = "kl_at"


@dataclass(frozen=True)
class Curve:
    """One curve. row: its method, which chooses panel and colour. order: sorts the curves of a panel, pale to full.

    formula: points of a thin line on which the curve should lie.
    """

    row: Row
    label: str
    order: float | None
    points: list[tuple[float, float]]
    formula: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return display_name(self.row)


def method_panels(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    logarithmic: bool = False,
    zero: bool = False,
    ticks: Sequence[int] = (),
    level: float | None = None,
) -> Figure:
    """One panel for each method, in the order of the curves, its own curves in colour and all others in grey.

    A panel's title names the method and its curves from pale to full colour. zero: draw a line at zero. ticks: contexts
    or budgets for a logarithmic x axis. level: where to draw a dashed line, for the full cache.
    """
    every = list(dict.fromkeys(curve.name for curve in curves))
    names = every[:MOST]
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
            colour = shade(colour_of(curve.row), (rank + 1) / len(own))
            few = len(curve.points) <= 16
            marker = {"marker": MARKERS[family_of(curve.row)], "markersize": 3} if few else {}
            axes.plot(*zip(*curve.points, strict=True), color=colour, linewidth=1.5, zorder=3, **marker)
            if curve.formula:
                axes.plot(*zip(*curve.formula, strict=True), color=INK, linewidth=0.6, zorder=4)
        axes.set_title(fitted(_title(name, own), WIDTH / columns - 0.2, 8), fontsize=8, color=INK, pad=3)
        if level is not None:
            axes.axhline(level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
        _scale(axes, values, logarithmic=logarithmic, zero=zero)
        if ticks:
            _contexts(axes, ticks, columns)
    for index in range(len(names), len(flat)):
        flat[index].remove()
        flat[index - columns].tick_params(labelbottom=True)
    more = f" ({len(names)} of {len(every)} methods, the others in grey)" if len(every) > len(names) else ""
    figure.supxlabel(x_label + more, fontsize=9)
    figure.supylabel(y_label, fontsize=9)
    return figure


def _title(name: str, own: Sequence[Curve]) -> str:
    """`h2o: 128, 256, 512`: the method, and its curves if there are several; a dash for one without settings."""
    words = [curve.label.removeprefix(name).strip() for curve in own]
    return f"{name}: {', '.join(word or '–' for word in words)}" if len(own) > 1 and any(words) else name


def _scale(axes: Axes, values: Sequence[float], *, logarithmic: bool, zero: bool) -> None:
    if logarithmic and max(values) < 20 * min(values):
        plain_log(axes, "y", values, most=5)
    elif logarithmic:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(plain_number)
    elif zero and max(map(abs, values)) > 1:  # one very large loss must not flatten the other curves
        symmetric_log(axes, values, 0.1)
    if zero:
        axes.axhline(0, color=FAINT, linewidth=0.7, zorder=2)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.xaxis.set_major_formatter(plain_number)


def _contexts(axes: Axes, ticks: Sequence[int], columns: int) -> None:
    """A logarithmic x axis with as many of the measured contexts as have room, the longest always."""
    step = math.ceil(len(ticks) / max(2, 12 // columns))
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


def kl_by_position(rows: Sequence[Row]) -> Plot | None:
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
            curves.append(Curve(line.row, names[config_of(line.row)], line.row.budget, values))
    if not curves:
        return None
    figure = method_panels(curves, "position of the scored token", "KL, nats", logarithmic=True)
    ends = {curve.label: curve.points[-1][1] for curve in curves}
    says = f"KL of {counted(ends, 'method')} at the last position: {extremes(ends, small, 'nats')}."
    return Plot(titled(figure, first, [line.row for line in lines]), says)


def extremes(values: Mapping[str, float], form: Callable[[float], str], unit: str = "") -> str:
    """`kivi8 1.2e-05 nats (lowest), random 128 1.3 nats (highest)`; a single value without such a word."""
    low, high = min(values, key=lambda name: values[name]), max(values, key=lambda name: values[name])
    if len(values) == 1:
        return f"{low} {form(values[low])} {unit}".rstrip()
    words = (f"{name} {form(values[name])} {unit}".rstrip() for name in (low, high))
    return " (lowest), ".join(words) + " (highest)"


def counted(values: Sized, noun: str) -> str:
    """`1 method`, `12 methods`"""
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _by_position(line: Line) -> dict[int, Row]:
    return next((found for (metric, _), found in line.curves.items() if metric == KL_BY_POSITION), {})


def loss_by_window(samples: Sequence[WindowSample]) -> Plot | None:
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
            curves.append(Curve(row, label, row.budget, [(i + 1.0, v) for i, v in enumerate(values)]))
    if not curves:
        return None
    figure = method_panels(curves, "window, sorted", "NLL above full, nats", zero=True)
    worst = {curve.label: curve.points[-1][1] for curve in curves}
    says = f"Largest NLL above full in one window, of {counted(worst, 'method')}: {extremes(worst, signed, 'nats')}."
    return Plot(titled(figure, here[0].row, [sample.row for sample in samples]), says)


def perplexity_by_budget(rows: Sequence[Row]) -> Plot | None:
    """Perplexity against the budget, in the setting with most methods at two budgets; None without such a method."""
    lines = [line for line in lines_of(rows, "perplexity") if math.isfinite(line.value("ppl") or math.nan)]
    settings: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        settings.setdefault(setting_of(line.row), []).append(line)
    here = max(settings.values(), key=lambda members: len(_swept(members)), default=[])
    swept = _swept(here)
    if not swept:
        return None
    curves = [_budget_curve(own) for own in swept.values()]
    base = next((line.value("ppl") for line in here if line.baseline), None)
    shares = all(x < 1 for curve in curves for x, _ in curve.points)
    axis = "budget, share of the prompt" if shares else "budget, tokens kept per KV head"
    ticks = [] if shares else sorted({round(x) for curve in curves for x, _ in curve.points})
    figure = method_panels(curves, axis, "perplexity", logarithmic=True, ticks=ticks, level=base)
    says = "Perplexity from the smallest to the largest budget: " + ", ".join(
        f"{curve.label} {significant(curve.points[0][1])} to {significant(curve.points[-1][1])}" for curve in curves[:8]
    )
    says += f"; full cache {significant(base)}." if base is not None else "."
    return Plot(titled(figure, here[0].row, [line.row for line in lines]), says)


def _swept(lines: Sequence[Line]) -> dict[tuple[object, ...], list[Line]]:
    """Settings of one method that differ in the budget only, where there are two or more."""
    series: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        if line.row.budget is not None and (line.value("ppl") or 0) > 0:
            series.setdefault((*series_of(line.row), line.row.protocol), []).append(line)
    return {key: own for key, own in series.items() if len({line.row.budget for line in own}) > 1}


def _budget_curve(lines: Sequence[Line]) -> Curve:
    points = sorted((line.row.budget or 0, line.value("ppl") or 0) for line in lines)
    row = lines[0].row
    decode = decode_of(row)
    return Curve(row, " ".join(filter(None, [display_name(row), decode])), None, points)
