"""Kept tokens: one panel for each method, in it a row for each layer and KV head, dark where tokens were kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvbench.report.compare.comparison import config_of
from kvbench.report.compare.names import labels, name_list, short_model
from kvbench.report.figures.layout import figure_of, fitted, width
from kvbench.report.figures.style import FAINT, INK
from kvbench.results.kept_tokens import NAMED, read_kept
from kvbench.results.row import KNOBS, Row

SHADES = LinearSegmentedColormap.from_list("kept", ["#F2F2F2", INK])
BINS = 300
"""Columns of a panel; more could not be told apart in print."""
SETTING = tuple(name for name in NAMED if name not in ("run", *KNOBS))
"""Columns that say which model, measure and context the tokens belong to."""
MOST = 6
"""Figures at most."""


@dataclass(frozen=True)
class KeptFigure:
    """One figure with the stem of its file, its caption, and a sentence with its main numbers."""

    name: str
    caption: str
    figure: Figure
    says: str


def kept_figures(runs: Sequence[Path]) -> Iterator[KeptFigure]:
    """A figure for each model, measure and context of which runs saved kept tokens; the longest contexts first."""
    tokens = read_kept(runs)
    if tokens.empty:
        return
    tokens = tokens[tokens["sample"] == tokens.groupby(list(NAMED), dropna=False)["sample"].transform("min")]
    settings = sorted(tokens.groupby(list(SETTING), dropna=False), key=lambda found: -found[1]["context"].iloc[0])
    for _, here in settings[:MOST]:
        first = here.iloc[0]
        question = f", question {first.question}" if isinstance(first.question, str) else ""
        context = [] if pd.isna(first.context) else [f"{first.context:.0f}"]
        after = f" after {first.context:,.0f} tokens" if context else ""
        where = f"{first.measure}{after}{question}" if len(settings) > 1 else first.measure
        words = [word for word in first[list(SETTING[1:])] if isinstance(word, str)]
        caption = (
            f"Tokens kept by each layer (first at the top) and KV head in the first sample of {where}; "
            "vertical line: end of the prompt"
        )
        yield KeptFigure("_".join(["kept", *words, *context, *_model(tokens, first.model)]), caption, *_figure(here))


def _model(tokens: pd.DataFrame, model: str) -> list[str]:
    """The model as a part of the file's name, if the tokens are of several models."""
    several = tokens["model"].nunique() > 1
    return ["".join(c if c.isalnum() else "-" for c in short_model(model, tokens["model"].unique()))] if several else []


def _figure(tokens: pd.DataFrame) -> tuple[Figure, str]:
    methods = {}
    for _, own in tokens.groupby(list(NAMED), dropna=False, sort=False):
        named: dict[str, Any] = {name: own[name].iloc[0] for name in NAMED}
        known = {name: value for name, value in named.items() if not pd.isna(value)}
        methods[Row(**known)] = own
    names, says = labels(list(methods)), []
    count, rows = tokens["position"].max() + 1, tokens["layer"].nunique() * (tokens["head"].max() + 1)
    figure, grid = figure_of(len(methods), height=0.75 + min(2.2, max(0.5, 0.018 * rows)))
    for axes, (row, own) in zip(grid, methods.items(), strict=True):
        _panel(axes, own, count)
        held = own.groupby(["layer", "head"]).size()
        sizes = f"{held.min():,}" if held.min() == held.max() else f"{held.min():,} to {held.max():,}"
        axes.set_title(fitted(f"{names[config_of(row)]}: {sizes} tokens a head", width(len(methods))))
        says.append(f"{names[config_of(row)]} {sizes}")
        axes.axvline(row.context or 0, color=FAINT, linewidth=0.8)
    figure.supxlabel("position", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    return figure, f"Tokens kept per KV head: {name_list(says, 12)}."


def _panel(axes: Axes, tokens: pd.DataFrame, count: int) -> None:
    layers, heads = sorted(tokens["layer"].unique()), tokens["head"].max() + 1
    place = {layer: i for i, layer in enumerate(layers)}
    line = tokens["layer"].map(place) * heads + tokens["head"]
    edges = np.linspace(0, count, min(BINS, count) + 1)
    kept, *_ = np.histogram2d(line, tokens["position"], bins=(np.arange(len(layers) * heads + 1), edges))
    share = kept / np.diff(np.ceil(edges))  # whole positions in a column
    axes.imshow(
        share,
        cmap=SHADES,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, count, len(layers) * heads, 0),
    )
    axes.set_xlim(-0.012 * count, count)  # the axis would hide the sinks
    axes.grid(False)
    step = math.ceil(len(layers) / 6)
    axes.set_yticks([(i + 0.5) * heads for i in range(0, len(layers), step)], layers[::step])
