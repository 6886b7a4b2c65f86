"""Perplexity against held bytes: what a method costs beside what it gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report import panels, quality, units
from kvbench.report.lines import Line, lines_of
from kvbench.report.names import config_of
from kvbench.report.panels import Drawn
from kvbench.report.place import Label, Point, label_points
from kvbench.report.style import FAINT, Looks, styles
from kvbench.results.row import Row

CROWD = 12  # methods with their settings in one panel, which then gets more room
MOST_NAMES = 14  # names that find a place beside their points; more stand in a legend
WIDEST = 50.0  # nats: a wider interval is none
SETTING = ("model", "dataset", "context", "dtype", "device")


@dataclass(frozen=True)
class Spot:
    """One method in the plane of bytes and perplexity."""

    drawn: Drawn
    held: float  # bytes a sequence
    context: int | None  # at which the bytes were measured
    ppl: float
    low: float
    high: float


def perplexity_bytes(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """Perplexity against bytes held a sequence, with the interval of the paired difference from the full cache.

    None unless both were measured.
    """
    lines = [line for line in lines_of(rows, "perplexity") if line.value("ppl") is not None]
    memory = [line for line in lines_of(rows, "memory") if line.value("held_bytes") is not None]
    groups: dict[str, list[Spot]] = {}
    for title, members in panels.grouped(lines, SETTING).items():
        spots = [spot for drawn in members if (spot := _spot(drawn, memory)) is not None]
        if len(spots) > 1:
            groups[title] = spots
    if not groups:
        return None
    looks = looks or styles(spot.drawn.name for spots in groups.values() for spot in spots)
    tall = max(map(len, groups.values())) > CROWD
    names = list(dict.fromkeys(spot.drawn.name for spots in groups.values() for spot in spots))
    named = len(names) <= MOST_NAMES
    figure, axes_list = panels.figure_of(len(groups), 4.8 if tall and named else 3.7 if len(groups) == 1 else 3.2)
    for axes, (title, spots) in zip(axes_list, groups.items(), strict=True):
        axes.set_title(panels.fitted(title, panels.width(len(groups))))
        segments = _draw(axes, spots, looks)
        if named:
            _label(figure, axes, spots, looks, segments)
    if not named:
        panels.legend_below(figure, [Line2D([], [], label=name, **looks[name].line()) for name in names])
    return figure


def bounds_of(line: Line) -> tuple[float, float]:
    """The interval of a perplexity beside the full cache's: that of the paired difference, which leaves out how much
    the windows of the text differ among themselves; the perplexity's own where there is no such difference."""
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


def _spot(drawn: Drawn, memory: Sequence[Line]) -> Spot | None:
    """Bytes from the perplexity run if it counted them, else from the memory run nearest in context."""
    row = drawn.line.get("ppl")
    if row is None or row.value is None or not math.isfinite(row.value):
        return None
    held = drawn.line.get("held_bytes")
    if held is None:
        partners = [line.get("held_bytes") for line in memory if _same_cache(line.row, row)]
        known = [partner for partner in partners if partner is not None and partner.value is not None]
        held = min(known, key=lambda partner: _distance(partner.context, row.context), default=None)
    if held is None or held.value is None:
        return None
    low, high = bounds_of(drawn.line)
    return Spot(drawn, held.value / (held.batch or 1), held.context, row.value, low, high)


def _same_cache(one: Row, other: Row) -> bool:
    return config_of(one) == config_of(other) and all(
        getattr(one, name) == getattr(other, name) for name in ("model", "dtype", "device")
    )


def _distance(one: int | None, other: int | None) -> float:
    return abs(math.log(one / other)) if one and other else math.inf


def _draw(axes: Axes, spots: Sequence[Spot], looks: Looks) -> list[tuple[Point, Point]]:
    """Points, intervals and front; returns the lines that no name may cover."""
    size, unit = units.byte_unit([spot.held for spot in spots])
    held = [spot.held / size for spot in spots]
    bounds = [spot.low for spot in spots] + [spot.high for spot in spots]
    contexts = {spot.context for spot in spots if spot.context is not None}
    if min(held) > 0 and max(held) / min(held) > 4:
        panels.plain_log(axes, "x", held)
    if min(bounds) > 0 and max(bounds) / min(bounds) > 3:
        panels.plain_log(axes, "y", bounds)
    axes.margins(0.12, 0.1)
    segments: list[tuple[Point, Point]] = []
    base = next((spot for spot in spots if spot.drawn.line.baseline), None)
    if base is not None:
        axes.axhline(base.ppl, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for name, members in _by_name(spots).items():
        curve = sorted(((spot.held / size, spot.ppl) for spot in members), key=lambda point: point[0])
        axes.plot(*zip(*curve, strict=True), **looks[name].line(), zorder=3)
        segments += itertools.pairwise(curve)
        for spot in members:
            x = spot.held / size
            axes.plot([x, x], [spot.low, spot.high], color=looks[name].colour, linewidth=1, zorder=2)
            segments.append(((x, spot.low), (x, spot.high)))
    front = quality.pareto_front([(spot.held / size, spot.ppl) for spot in spots])
    panels.draw_front(axes, front)
    for (x, y), (after, below) in itertools.pairwise(front):
        segments += [((x, y), (after, y)), ((after, y), (after, below))]
    at = f" at {min(contexts):,} tokens" if len(contexts) == 1 else ""
    axes.set_xlabel(f"held{at}, {unit} per sequence")
    axes.set_ylabel("perplexity")
    if base is not None:
        left, right = axes.get_xlim()
        segments.append(((left, base.ppl), (right, base.ppl)))
    return segments


def _by_name(spots: Sequence[Spot]) -> dict[str, list[Spot]]:
    names: dict[str, list[Spot]] = {}
    for spot in spots:
        names.setdefault(spot.drawn.name, []).append(spot)
    return names


def _label(
    figure: Figure, axes: Axes, spots: Sequence[Spot], looks: Looks, segments: Sequence[tuple[Point, Point]]
) -> None:
    """Names at the points. In a sweep the largest cache carries the name, the others only their knob."""
    size, _ = units.byte_unit([spot.held for spot in spots])
    labels = []
    for spot in spots:
        family = [other for other in spots if other.drawn.name == spot.drawn.name]
        minor = spot is not max(family, key=lambda other: other.held)
        text = spot.drawn.label.removeprefix(spot.drawn.name).strip() if minor else spot.drawn.label
        labels.append(Label((spot.held / size, spot.ppl), panels.shortened(text), looks[spot.drawn.name].colour, minor))
    label_points(figure, axes, labels, segments)
