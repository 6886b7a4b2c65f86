"""Colour, marker and line of each method, the same in all figures; sizes for a printed page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Twelve colours that can be told from each other and from black with normal vision, protanopia, deuteranopia and
# tritanopia (CIEDE2000 of at least 10 between any two). Markers differ as well, for prints without colour.
PALETTE = (
    "#882255",
    "#AA4466",
    "#E20134",
    "#008DF9",
    "#8400CD",
    "#332288",
    "#117733",
    "#E69F00",
    "#661100",
    "#EE6677",
    "#56B4E9",
    "#CC79A7",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
# With this salt the methods of kvbench get different colours, so the colour of a method does not depend on which other
# methods a report holds.
SALT = 235525
BASELINE = "full"
# matplotlib settings for figures 6.5 inches wide, the text width of a page.
RC = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "savefig.dpi": 200,
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
WIDTH = 6.5
INK = "#222222"
FAINT = "#777777"


@dataclass(frozen=True)
class Style:
    """How a method is drawn. From the thirteenth method of a report on markers are hollow."""

    colour: str
    marker: str
    dash: Any
    hollow: bool = False

    def line(self) -> dict[str, Any]:
        """Keyword arguments for `Axes.plot`."""
        face = "white" if self.hollow else self.colour
        look = {"color": self.colour, "marker": self.marker, "linestyle": self.dash}
        return look | {"markerfacecolor": face, "markeredgecolor": self.colour, "markeredgewidth": 1.2}

    def bar(self) -> dict[str, Any]:
        """Keyword arguments for `Axes.barh`: hatched where the marker is hollow."""
        if not self.hollow:
            return {"color": self.colour}
        return {"facecolor": "white", "edgecolor": self.colour, "hatch": "/////", "linewidth": 1}


Looks = dict[str, Style]  # by display name


def styles(names: Iterable[str]) -> Looks:
    """A style for every display name, distinct for up to 24 of them; `full` is always black.

    The hash of a name chooses its colour. Where two names choose the same, a plain method goes before a combination,
    then the alphabet decides, and the other name takes the next free colour.
    """
    chosen: Looks = {BASELINE: Style(INK, "o", "-")}
    taken: set[int] = set()
    for name in sorted(set(names) - {BASELINE}, key=lambda name: (name.count("+"), name)):
        wanted = hashlib.sha256(f"{SALT}:{name}".encode()).digest()[0] % len(PALETTE)
        slots = range(len(PALETTE) * 2)
        order = sorted(slots, key=lambda slot: (slot >= len(PALETTE), (slot - wanted) % len(PALETTE)))
        slot = next((slot for slot in order if slot not in taken), wanted)
        taken.add(slot)
        index = slot % len(PALETTE)
        chosen[name] = Style(PALETTE[index], MARKERS[index], DASHES[index % len(DASHES)], slot != index)
    return chosen
