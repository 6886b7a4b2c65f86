"""Bars, one for each method: speed as percent of the full cache, share of memory bandwidth, held bytes by part."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import Line, baseline_of, lines_of
from kvbench.report.compare.method_kinds import FAMILIES, family_of
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Drawn, Plot
from kvbench.report.figures.method_panels import counted, extremes
from kvbench.report.figures.point_labels import HALO
from kvbench.report.figures.style import COLOURS, INK, WIDTH, bar_of
from kvbench.results.row import MEMORY_PARTS, Row

PART_COLOURS = {
    "dense": "#999999",
    "codes": "#332288",
    "scales": "#56B4E9",
    "residual": "#E69F00",
    "basis": "#999933",
    "outliers": "#44AA99",
    "scores": "#882255",
    "positions": "#117733",
    "state": "#CC79A7",
}
OTHER = "#D0D0D0"
BANDWIDTH = "bandwidth_share"
TPOT = "tpot_p50_ms"
TALLEST = 8.4
"""Inches: what a printed page holds beside the caption."""
PITCH = (0.15, 0.24)
"""Inches from one bar to the next: the narrowest that is legible, and the widest."""
FRAME = 0.75
"""Inches of title and axis of a panel."""

Panels = dict[str, list[Drawn]]


def speed_bars(rows: Sequence[Row]) -> Plot | None:
    """Tokens a second as percent of the full cache timed in the same run, at the longest context; None without."""
    lines = lines_of(rows, "latency")
    speeds = {id(line): speed for line in lines if not line.baseline and (speed := _speed(line, lines)) is not None}
    panels = _panels(lines, {id(line) for line in lines if id(line) in speeds})
    if not panels:
        return None
    for members in panels.values():
        members.sort(key=lambda drawn: -speeds[id(drawn.line)])
    figure, axes_list = _figure_of(panels)
    says = []
    for axes, (title, members) in zip(axes_list, panels.items(), strict=True):
        _prepare(axes, title, members)
        values = {drawn.label: 100 * speeds[id(drawn.line)] for drawn in members}
        for y, drawn in enumerate(members):
            axes.barh(y, values[drawn.label], height=0.62, **bar_of(drawn.line.row))
            _number(axes, values[drawn.label], y, f"{values[drawn.label]:.0f}%")
        axes.axvline(100, color=INK, linewidth=0.7)
        _finish(axes, f"tokens a second, % of the full cache in the same run, {_context_of(members)}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.6g}%")
        says.append(_said(title, f"speed at {_context_of(members)}", values, lambda value: f"{value:.0f}%"))
    _families_below(figure, panels)
    return Plot(figure, " ".join(says))


def _speed(line: Line, lines: Sequence[Line]) -> float | None:
    """Time per output token of the full cache over that of the method, both of one run and context."""
    row = line.get(TPOT)
    if row is None or not row.value or row.value <= 0:
        return None
    same = [other for other in lines if other.baseline and (its := other.get(TPOT)) is not None and its.run == row.run]
    base = baseline_of(line, same)
    full = base.value(TPOT) if base is not None else None
    return full / row.value if full and full > 0 else None


def bandwidth_bars(rows: Sequence[Row]) -> Plot | None:
    """Share of the memory bandwidth that a step reaches, at the longest context of each setting; None without rows."""
    lines = lines_of(rows, "latency")
    panels = _panels(lines, {id(line) for line in lines if (line.value(BANDWIDTH) or 0) > 0})
    if not panels:
        return None
    figure, axes_list = _figure_of(panels)
    says = []
    for axes, (title, members) in zip(axes_list, panels.items(), strict=True):
        _prepare(axes, title, members)
        shares = {drawn.label: drawn.line.value(BANDWIDTH) or 0 for drawn in members}
        for y, drawn in enumerate(members):
            axes.barh(y, 100 * shares[drawn.label], height=0.62, **bar_of(drawn.line.row))
            _number(axes, 100 * shares[drawn.label], y, number_text.percent(shares[drawn.label]))
        _finish(axes, f"share of the memory's bandwidth, {_context_of(members)}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.6g}%")
        says.append(_said(title, "share of the memory's bandwidth", shares, number_text.percent))
    _families_below(figure, panels)
    return Plot(figure, " ".join(says))


def memory_parts(rows: Sequence[Row]) -> Plot | None:
    """Held bytes by part at the longest context of each setting, with the formula of a dense cache; None without."""
    lines = lines_of(rows, "memory")
    panels = _panels(lines, {id(line) for line in lines if (line.value("held_bytes") or -1) >= 0})
    if not panels:
        return None
    every = [drawn.line for members in panels.values() for drawn in members]
    size, unit = number_text.byte_unit([line.value("held_bytes") or 0 for line in every])
    figure, axes_list = _figure_of(panels)
    found: set[str] = set()
    says = []
    for axes, (title, members) in zip(axes_list, panels.items(), strict=True):
        _prepare(axes, title, members)
        dense = next((value for drawn in members for value in drawn.line.values("dense_bytes")), None)
        if dense is not None:
            axes.axvline(dense / size, color=INK, linewidth=0.7, zorder=1)
        for y, drawn in enumerate(members):
            found |= _stacked(axes, y, drawn.line, size)
        _finish(axes, f"held by the cache, {unit}, {_context_of(members)}")
        held = {drawn.label: (drawn.line.value("held_bytes") or 0) / size for drawn in members}
        says.append(_said(title, f"bytes held at {_context_of(members)}", held, number_text.significant, unit))
    handles: list[Patch | Line2D] = [
        Patch(color=PART_COLOURS.get(part, OTHER), label=part) for part in (*MEMORY_PARTS, "other") if part in found
    ]
    handles.append(Line2D([], [], color=INK, linewidth=0.7, label="dense formula"))
    layout.legend_below(figure, handles)
    return Plot(figure, " ".join(says))


def _stacked(axes: Axes, y: float, line: Line, size: float) -> set[str]:
    """Draw the parts of one cache side by side; returns their names."""
    held = line.value("held_bytes") or 0
    parts = {part: line.value(f"held_bytes.{part}") or 0 for part in MEMORY_PARTS}
    parts["other"] = max(0, held - sum(parts.values()))
    left, found = 0.0, set()
    for part, value in parts.items():
        if value > 1e-4 * held:
            axes.barh(y, value / size, left=left, height=0.62, color=PART_COLOURS.get(part, OTHER))
            left += value / size
            found.add(part)
    _number(axes, left, y, number_text.significant(held / size))
    return found


def _panels(lines: Sequence[Line], drawn: set[int]) -> Panels:
    """A panel for each setting, with those of its lines in `drawn` (by id) at the longest context that they have."""
    groups = layout.grouped([line for line in lines if line.row.context])  # of all lines: labels name what varies
    chosen = {title: [one for one in members if id(one.line) in drawn] for title, members in groups.items()}
    return {title: _longest(members) for title, members in chosen.items() if members}


def _longest(members: Sequence[Drawn]) -> list[Drawn]:
    longest = max(drawn.line.row.context or 0 for drawn in members)
    return [drawn for drawn in members if drawn.line.row.context == longest]


def _figure_of(panels: Panels) -> tuple[Figure, list[Axes]]:
    """One panel below the other, each as high as its bars need, together no higher than a printed page.

    Of a panel with more bars than fit the first ones stay.
    """
    room = TALLEST - FRAME * len(panels)
    most = max(4, int(room / PITCH[0] / len(panels)))
    over = sum(map(len, panels.values())) * PITCH[0] > room
    for title, members in panels.items():
        if over and len(members) > most:
            panels[title] = members[:most]
    bars = sum(map(len, panels.values()))
    pitch = min(PITCH[1], max(PITCH[0], room / bars))
    heights = [FRAME + pitch * len(members) for members in panels.values()]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(WIDTH, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    return figure, list(grid[:, 0])


def _families_below(figure: Figure, panels: Panels) -> None:
    shown = {family_of(drawn.line.row) for members in panels.values() for drawn in members}
    handles = [Patch(color=COLOURS[family], label=words) for family, words in FAMILIES.items() if family in shown]
    layout.legend_below(figure, handles)


def _prepare(axes: Axes, title: str, members: Sequence[Drawn]) -> None:
    axes.set_title(layout.fitted(title, WIDTH))
    names = [layout.shortened(drawn.label) for drawn in members]
    axes.set_yticks(range(len(members)), names, fontsize=8 if len(members) < 36 else 7)
    axes.set_ylim(len(members) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _number(axes: Axes, x: float, y: float, text: str) -> None:
    number = axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=7)
    number.set_path_effects(HALO)


def _finish(axes: Axes, label: str) -> None:
    axes.margins(x=0.1)
    axes.set_xlim(left=0, right=axes.get_xlim()[1] or 1)
    axes.set_xlabel(label, loc="right", fontsize=8)


def _context_of(members: Sequence[Drawn]) -> str:
    return f"context {members[0].line.row.context or 0:,}"


def _said(title: str, what: str, values: dict[str, float], form: number_text.Format, unit: str = "") -> str:
    where = f"{title}: " if title else ""
    return f"{where}{what} of {counted(values, 'setting')}: {extremes(values, form, unit)}."
