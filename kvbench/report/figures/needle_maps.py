"""Needle maps: needles found by prompt length and depth, one panel for each method, one colour scale for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.patches import Rectangle

from kvbench.report.compare.comparison import Line, lines_of
from kvbench.report.compare.needle_hits import Hits, Place, hits_of, total, uninformative_places
from kvbench.report.figures import layout
from kvbench.report.figures.layout import LONGEST, Drawn, Plot
from kvbench.report.figures.style import FAINT, INK, WIDTH, ink_on
from kvbench.results.row import Row

COLOURS = "cividis"
"""Its lightness rises evenly, and it looks the same to colour-blind readers."""
GREY = "#DDDDDD"
MOST_SAID = 8
MOST_LINES = 30
"""Methods below each other; more stand in two columns, so that they fit a page."""


def needle_maps(rows: Sequence[Row]) -> Plot | None:
    """Lengths by depths, one panel for each method; with one length only, methods by depths. None without hits or with
    several tasks.

    All panels share one colour scale.
    """
    lines = [line for line in lines_of(rows, "needle", by_context=False) if hits_of(line)]
    if not lines or len({line.row.protocol for line in lines}) > 1:  # then `needle_tasks`
        return None
    failing = {id(line): bad for line, bad in zip(lines, uninformative_places(lines).values(), strict=True)}
    groups = layout.grouped(lines, join_architectures=True)
    lengths, depths = _axes_of(lines)
    height = _one_height if len(lengths) == 1 else _panel_height
    heights = [height(len(members), len(lengths), len(depths)) for members in groups.values()]
    narrow = len(lengths) == 1 and max(map(len, groups.values())) <= MOST_LINES
    figure = plt.figure(figsize=(WIDTH * 0.8 if narrow else WIDTH, sum(heights)))
    parts = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, members) in zip(parts, groups.items(), strict=True):
        if title:
            part.suptitle(layout.fitted(title, WIDTH * 0.8, 10), fontsize=10)
        draw = _one_panel if len(lengths) == 1 else _panels
        draw(part, members, lengths, depths, failing)
    return Plot(figure, " ".join(_said(title, members) for title, members in groups.items()))


def _said(title: str, members: Sequence[Drawn]) -> str:
    found = {drawn.label: total(hits_of(drawn.line).values()) for drawn in members}
    sums = {label: hits for label, hits in found.items() if hits is not None}
    full = sums.pop("full", None)
    words = [f"full {full} needles"] if full is not None else []
    words += [f"{label} {hits}" for label, hits in sorted(sums.items(), key=lambda item: -item[1].rate)[:MOST_SAID]]
    where = f"{title}: " if title else ""
    fewest = min(sums, key=lambda label: sums[label].rate, default=None)
    last = f"; fewest: {fewest} {sums[fewest]}" if fewest is not None and len(sums) > MOST_SAID else ""
    return f"{where}{', '.join(words)}{last}."


def _axes_of(lines: Sequence[Line]) -> tuple[list[int | None], list[float | None]]:
    places = {place for line in lines for place in hits_of(line)}
    lengths = sorted({length for length, _ in places}, key=lambda length: length or 0)
    depths = sorted({depth for _, depth in places}, key=lambda depth: -1 if depth is None else depth)
    return lengths, depths


def _columns(methods: int, lengths: int) -> int:
    return min(4, methods, max(1, 16 // lengths))


def _panel_height(methods: int, lengths: int, depths: int) -> float:
    rows = math.ceil(methods / _columns(methods, lengths))
    return 0.7 + rows * (0.35 + min(2.4, 0.22 * depths))


def _one_height(methods: int, lengths: int, depths: int) -> float:
    return 0.95 + 0.26 * math.ceil(methods / _one_columns(methods))


def _one_columns(methods: int) -> int:
    return 1 if methods <= MOST_LINES else 2


def _panels(
    figure: SubFigure,
    members: Sequence[Drawn],
    lengths: Sequence[int | None],
    depths: Sequence[float | None],
    failing: dict[int, set[Place]],
) -> None:
    columns = _columns(len(members), len(lengths))
    rows = math.ceil(len(members) / columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    flat = list(grid.flat)
    names = layout.tokens(lengths)
    # A panel is about 1.3 inches wide when four stand in a row, a character about 0.07 inches.
    tight = 0.07 * (sum(map(len, names)) + len(names)) > (WIDTH - 1.3) / columns
    for axes, drawn in zip(flat, members, strict=False):
        hits, bad = hits_of(drawn.line), failing[id(drawn.line)]
        table = [[hits.get((length, depth)) for length in lengths] for depth in depths]
        _map(axes, table, [[(length, depth) in bad for length in lengths] for depth in depths])
        axes.set_title(layout.fitted(drawn.label, (WIDTH - 1.3) / columns))
        axes.set_xticks(range(len(lengths)), names, rotation=90 if tight else 0)
        axes.set_yticks(range(len(depths)), [_share(depth) for depth in depths])
    for index in range(len(members), len(flat)):
        flat[index].remove()
        flat[index - columns].tick_params(labelbottom=True)  # the lowest panel of this column
    figure.supxlabel("context length, tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    _scale(figure, flat[: len(members)], any(failing[id(drawn.line)] for drawn in members))


def _one_panel(
    figure: SubFigure,
    members: Sequence[Drawn],
    lengths: Sequence[int | None],
    depths: Sequence[float | None],
    failing: dict[int, set[Place]],
) -> None:
    (length,) = lengths
    columns = _one_columns(len(members))
    rows = math.ceil(len(members) / columns)
    grid = figure.subplots(1, columns, squeeze=False)[0]
    for index, axes in enumerate(grid):
        here = members[index * rows : (index + 1) * rows]
        lines = [drawn.line for drawn in here]
        table = [[hits_of(line).get((length, depth)) for depth in depths] for line in lines]
        _map(axes, table, [[(length, depth) in failing[id(line)] for depth in depths] for line in lines])
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xticks(range(len(depths)), [_share(depth) for depth in depths])
        axes.set_yticks(range(len(here)), [layout.shortened(drawn.label, LONGEST // columns) for drawn in here])
    figure.supxlabel(f"depth of the needle in {layout.tokens(lengths)[0]} tokens", fontsize=9)
    _scale(figure, list(grid), any(failing[id(drawn.line)] for drawn in members))


def _map(axes: Axes, table: Sequence[Sequence[Hits | None]], bad: Sequence[Sequence[bool]]) -> None:
    rates = [[float("nan") if hits is None else hits.rate for hits in line] for line in table]
    axes.imshow(rates, cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for y, line in enumerate(table):
        for x, hits in enumerate(line):
            if hits is None:
                continue
            ink = ink_on(*plt.get_cmap(COLOURS)(hits.rate)[:3])
            if bad[y][x]:
                corner = (x - 0.5, y - 0.5)
                cover = Rectangle(corner, 1, 1, facecolor=GREY, edgecolor="#AAAAAA", linewidth=0)
                cover.set_hatch("////")
                axes.add_patch(cover)
                ink = INK
            box = {"facecolor": GREY, "edgecolor": "none", "pad": 0.6} if bad[y][x] else None
            axes.text(x, y, str(hits), ha="center", va="center", fontsize=7.5, color=ink, bbox=box)
    for x in range(1, len(table[0])):
        axes.axvline(x - 0.5, color="white", linewidth=1.2)
    for y in range(1, len(table)):
        axes.axhline(y - 0.5, color="white", linewidth=1.2)


def _scale(figure: SubFigure, axes: list[Axes], hatched: bool) -> None:
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.9, fraction=0.035, aspect=40, pad=0.02)
    bar.set_label("hit rate")
    bar.outline.set_visible(False)
    if hatched:
        text = "hatched: the full cache finds fewer than half"
        figure.text(0.01, 0.003, text, fontsize=7, color=FAINT, va="bottom")


def _share(depth: float | None) -> str:
    return "?" if depth is None else f"{100 * depth:g}%"
