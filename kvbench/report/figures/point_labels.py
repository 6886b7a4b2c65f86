"""Labels beside points, placed so that they cover neither each other nor a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.text import Annotation
from numpy.typing import NDArray

Point = tuple[float, float]
Boxes = NDArray[np.float64]  # [N, 4]: x0, y0, x1, y1 in pixels

ANGLES = (0, 45, -45, 90, -90, 180, 135, -135, 22, -22, 68, -68, 112, -112, 158, -158)
"""Degrees at which a place is tried, in this order."""
DISTANCES = (7, 13, 20, 30, 42, 56, 75, 100)
"""Points (1/72 inch) between a mark and its label, in this order; from the second on with a leader line."""
NEAR = 1
"""How many of these distances are tried for a minor label."""
REACHES = (DISTANCES[:3], DISTANCES)
"""Distances for other labels: first those near the point, where a label may lie on a line if it must."""
HALO: list[AbstractPathEffect] = [withStroke(linewidth=2, foreground="white")]
"""Around a label, so that it is legible on a line."""
MARGIN = 2.0
"""Pixels kept free around every label."""
MARK_RADIUS = 6.0
"""Pixels around the centre of a mark that no label may touch."""
FONT_SIZE = 7.5


@dataclass(frozen=True)
class Label:
    """A text for a point in data coordinates. A `minor` label is written only where there is room close by."""

    point: Point
    text: str
    colour: str
    minor: bool = False


def label_points(
    figure: Figure, axes: Axes, labels: Sequence[Label], segments: Sequence[tuple[Point, Point]] = ()
) -> list[Annotation]:
    """Write each text at the nearest free place beside its point and return what was written.

    A free place is inside the axes and touches no point, no earlier label and no leader line. Places that touch a
    `segment` (curve, front) come after those that touch none, at the same reach. Far labels get a thin leader line, if
    possible one that crosses no label. A label without a free place is left out.
    """
    figure.canvas.draw()
    centres = axes.transData.transform([label.point for label in labels])
    obstacles = [_around(centre[None], MARK_RADIUS) for centre in centres]
    lines = [_along(*axes.transData.transform([start, end])) for start, end in segments]
    written: list[Boxes] = []
    placed = []
    # Names before knobs; then the most crowded points first, while there is still room around them.
    for index in sorted(range(len(labels)), key=lambda i: (labels[i].minor, -_crowding(centres[i], centres))):
        size = _size(figure, axes, labels[index].text)
        spot = None
        for reach in (DISTANCES[:NEAR],) if labels[index].minor else REACHES:
            for avoided in (lines,) if labels[index].minor else (lines, []):
                others = np.concatenate([*obstacles, *written, *avoided])
                spot = spot or _free_spot(figure, axes, centres[index], size, reach, others, written)
        if spot is None:
            continue
        offset, box, leader = spot
        written.append(box)
        if leader is not None:
            obstacles.append(leader)
        placed.append(_write(axes, labels[index], offset, leader is not None))
    return placed


def _free_spot(
    figure: Figure,
    axes: Axes,
    centre: Boxes,
    size: Point,
    reach: Sequence[float],
    obstacles: Boxes,
    written: Sequence[Boxes],
) -> tuple[Point, Boxes, Boxes | None] | None:
    """Offset in points, box and leader of the first place that is free."""
    frame = axes.get_window_extent()
    pixels = figure.dpi / 72
    second = None
    for distance in reach:
        for angle in ANGLES:
            x, y = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            anchor = centre + np.array([x, y]) * pixels
            shift = np.array([-size[0] * (1 - _side(x, 1)) / 2, -size[1] * (1 - _side(y, 3)) / 2])
            low = anchor + shift - MARGIN
            box = np.concatenate([low, low + np.array(size) + 2 * MARGIN])[None]
            if not _inside(box[0], np.array(frame.extents)) or _overlap(box, obstacles):
                continue
            if distance == DISTANCES[0]:
                return (x, y), box, None
            leader = _along(centre, anchor)
            if not written or not _overlap(leader, np.concatenate(written)):
                return (x, y), box, leader
            second = second or ((x, y), box, leader)
    return second


def _side(offset: float, tolerance: float) -> int:
    """1: the label lies beyond the anchor, -1: before it, 0: centred on it."""
    return (offset > tolerance) - (offset < -tolerance)


def _write(axes: Axes, label: Label, offset: Point, leader: bool) -> Annotation:
    line = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4, "alpha": 0.7}
    written = axes.annotate(
        label.text,
        label.point,
        offset,
        textcoords="offset points",
        color=label.colour,
        fontsize=FONT_SIZE,
        ha=("center", "left", "right")[_side(offset[0], 1)],
        va=("center", "bottom", "top")[_side(offset[1], 3)],
        arrowprops=line if leader else None,
    )
    written.set_in_layout(False)
    written.set_path_effects(HALO)
    return written


def _size(figure: Figure, axes: Axes, text: str) -> Point:
    """Width and height of a text in pixels."""
    trial = axes.text(0, 0, text, fontsize=FONT_SIZE)
    box = trial.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    trial.remove()
    return box.width, box.height


def _along(start: Boxes, end: Boxes) -> Boxes:
    steps = max(2, round(float(np.hypot(*(end - start))) / 4))
    return _around(start + np.linspace(0, 1, steps)[:, None] * (end - start), 1.5)


def _around(centres: Boxes, radius: float) -> Boxes:
    return np.concatenate([centres - radius, centres + radius], axis=1)


def _overlap(some: Boxes, others: Boxes) -> bool:
    low = np.maximum(some[:, None, :2], others[None, :, :2])
    high = np.minimum(some[:, None, 2:], others[None, :, 2:])
    return bool((low < high).all(-1).any())


def _inside(box: Boxes, frame: Boxes) -> bool:
    return bool((box[:2] >= frame[:2]).all() and (box[2:] <= frame[2:]).all())


def _crowding(centre: Boxes, centres: Boxes) -> float:
    return float((1 / (1 + np.hypot(*(centres - centre).T))).sum())
