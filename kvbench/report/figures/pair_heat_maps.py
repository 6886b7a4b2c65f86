"""Heat maps of paired differences between methods: one panel for each budget and decode mode."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, decode_of
from kvbench.report.compare.method_families import MethodFamily
from kvbench.report.compare.names import knob_text, name_list, short_model
from kvbench.report.figures.layout import Plot, shortened
from kvbench.report.figures.style import WIDTH, ink_on

MOST_PANELS = 4
MOST_METHODS = 14
"""Methods of a panel: those with the lowest ΔNLL."""
LINEAR = 0.01
"""Nats. Colours are linear in the difference up to here, logarithmic beyond."""
PALE = 0.25


def pair_heat_maps(families: Sequence[MethodFamily]) -> Plot | None:
    """The families with most methods; None without a family. Families of two come last."""
    larger = [family for family in families if len(family.rows) > 2] or families
    shown = sorted(larger, key=lambda family: -len(family.rows))[:MOST_PANELS]
    if not shown:
        return None
    shown = [family for family in families if any(family is other for other in shown)]
    places = [_places(family) for family in shown]
    largest = max(
        np.nanmax(np.abs(family.matrix.difference[np.ix_(own, own)])) for family, own in zip(shown, places, strict=True)
    )
    norm = SymLogNorm(LINEAR, vmin=-max(largest, LINEAR), vmax=max(largest, LINEAR))
    heights = [0.55 + 0.27 * (len(own) + 2) for own in places]
    figure, grid = plt.subplots(
        len(shown), 1, figsize=(WIDTH, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, family, own in zip(grid[:, 0], shown, places, strict=True):
        _panel(axes, family, own, norm)
        axes.set_title(_title(family, shown))
    return Plot(figure, " ".join(_said(family, shown) for family in shown))


def _said(family: MethodFamily, families: Sequence[MethodFamily]) -> str:
    size = len(family.rows)
    apart = sum(family.differ(one, other) for one in range(size) for other in range(one + 1, size))
    best = name_list([family.labels[place] for place in family.best])
    pairs = f"{apart} of {size * (size - 1) // 2} pairs can be told apart"
    return f"{_title(family, families)}: {pairs}" + (f"; best: {best}." if family.marks_best else ".")


def _places(family: MethodFamily) -> list[int]:
    """Methods of a panel in ascending order of ΔNLL."""
    return sorted(range(len(family.rows)), key=lambda place: family.matrix.difference[place, 0])[:MOST_METHODS]


def _panel(axes: Axes, family: MethodFamily, places: Sequence[int], norm: SymLogNorm) -> None:
    difference = family.matrix.difference[np.ix_(places, places)]
    colours = plt.get_cmap("RdBu_r")(norm(difference))
    for i, one in enumerate(places):
        for j, other in enumerate(places):
            differ = family.differ(one, other)
            if not differ:
                colours[i, j, :3] = 1 - PALE * (1 - colours[i, j, :3])
            if i != j:
                weight = "bold" if differ else "normal"
                axes.text(
                    j,
                    i,
                    f"{difference[i, j]:+.2g}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    weight=weight,
                    color=ink_on(*colours[i, j, :3]),
                )
    axes.imshow(colours, aspect="auto")
    names = [_name(family, place) for place in places]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _name(family: MethodFamily, place: int) -> str:
    """The label without the budget, which stands in the title."""
    budget = family.rows[place].budget
    words = [word for word in family.labels[place].split(" ") if word.rstrip(",") != knob_text("budget", budget)]
    return shortened(" ".join(words), 24)


def _title(family: MethodFamily, families: Sequence[MethodFamily]) -> str:
    row = family.rows[0]
    columns = (*MODEL_AND_DEVICE, "context", "protocol")
    varying = [name for name in columns if len({getattr(other.rows[0], name) for other in families}) > 1]
    words = [
        short_model(row.model) if name == "model" else f"{name.replace('_', ' ')} {getattr(row, name)}"
        for name in varying
    ]
    words.append("no budget" if row.budget is None else f"budget {knob_text('budget', row.budget)}")
    words += [f"decode {decode}"] if (decode := decode_of(row)) else []
    return ", ".join([*words, f"{family.matrix.n} windows"])
