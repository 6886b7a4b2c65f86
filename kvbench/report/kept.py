"""Kept tokens: one panel a method, a row of it for each layer and head, dark where tokens stayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvbench.report.columns import short_model
from kvbench.report.names import config_of, labels
from kvbench.report.panels import figure_of, fitted, styled, width
from kvbench.report.plots import Plot, save
from kvbench.report.style import FAINT, INK
from kvbench.results.kept_tokens import NAMED, read_kept
from kvbench.results.row import Row

SHADES = LinearSegmentedColormap.from_list("kept", ["#F2F2F2", INK])
BINS = 300
"""Columns of a panel: more would fall on one another in print."""
PLACE = ("model", "measure", "protocol", "question", "context")
MOST = 6


def draw_kept(runs: Sequence[Path], folder: Path) -> list[Plot]:
    """One figure for each model, measure and context that runs saved kept tokens of; the longest contexts first."""
    tokens = read_kept(runs)
    if tokens.empty:
        return []
    tokens = tokens[tokens["sample"] == tokens.groupby(list(NAMED), dropna=False)["sample"].transform("min")]
    places = sorted(tokens.groupby(list(PLACE), dropna=False), key=lambda place: -place[1]["context"].iloc[0])
    drawn = []
    with styled():
        for _, here in places[:MOST]:
            first = here.iloc[0]
            asked = f", question {first.question}" if isinstance(first.question, str) else ""
            context = [] if pd.isna(first.context) else [f"{first.context:.0f}"]
            after = f" after {first.context:,.0f} tokens" if context else ""
            where = f"{first.measure}{after}{asked}" if len(places) > 1 else first.measure
            name = "_".join(
                str(part)
                for part in (
                    "kept",
                    *(p for p in first[list(PLACE[1:])] if isinstance(p, str)),
                    *context,
                    *_model(tokens, first.model),
                )
            )
            caption = (
                f"Tokens kept by each layer (top: the first) and KV head in the first sample of {where}; "
                f"the line: where the prompt ends"
            )
            save(_figure(here), folder / name)
            drawn.append(Plot(f"{name}.png", "Tokens kept", caption))
    return drawn


def _model(tokens: pd.DataFrame, model: str) -> list[str]:
    """Part of the file's name, where a report holds several models."""
    several = tokens["model"].nunique() > 1
    return ["".join(c if c.isalnum() else "-" for c in short_model(model, tokens["model"].unique()))] if several else []


def _figure(tokens: pd.DataFrame) -> Figure:
    methods = {}
    for _, own in tokens.groupby(list(NAMED), dropna=False, sort=False):
        named: dict[str, Any] = {name: own[name].iloc[0] for name in NAMED}
        known = {name: value for name, value in named.items() if not pd.isna(value)}
        methods[Row(**known)] = own
    names = labels(list(methods))
    count, rows = tokens["position"].max() + 1, tokens["layer"].nunique() * (tokens["head"].max() + 1)
    figure, grid = figure_of(len(methods), height=0.75 + min(2.2, max(0.5, 0.018 * rows)))
    for axes, (row, own) in zip(grid, methods.items(), strict=True):
        _panel(axes, own, count)
        held = own.groupby(["layer", "head"]).size()
        sizes = f"{held.min():,}" if held.min() == held.max() else f"{held.min():,} to {held.max():,}"
        axes.set_title(fitted(f"{names[config_of(row)]}: {sizes} tokens a head", width(len(methods))))
        axes.axvline(row.context or 0, color=FAINT, linewidth=0.8)
    figure.supxlabel("position", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    return figure


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
    axes.set_xlim(-0.012 * count, count)  # the sinks would hide behind the axis
    axes.grid(False)
    step = math.ceil(len(layers) / 6)
    axes.set_yticks([(i + 0.5) * heads for i in range(0, len(layers), step)], layers[::step])
