"""Heat maps of the attention output's error: one panel for each method, in it layers by KV heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

from kvbench.report.compare.comparison import config_of, is_baseline
from kvbench.report.compare.names import labels, name_list
from kvbench.report.compare.window_samples import entries_of, row_of
from kvbench.report.figures.layout import Plot, figure_of, fitted, width
from kvbench.results.row import Row
from kvbench.results.run_files import sample_records

BY_HEAD = "output_error"
MOST = 16
"""Panels at most: the methods with the largest errors are left out."""
COLUMNS = 4
LOWEST, HIGHEST = 1e-3, 1.0
"""Ends of the colour scale, as a share of the exact output's norm."""


@dataclass
class ErrorMap:
    """A method's errors by layer and KV head, summed over its windows. layers: the model's indices."""

    row: Row
    layers: list[int]
    windows: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def mean(self) -> np.ndarray:
        """Over windows: [layers, Hkv]."""
        mean: np.ndarray = np.mean(list(self.windows.values()), axis=0)
        return mean


def error_maps(runs: Sequence[Path]) -> Plot | None:
    """The methods of the longest context, smallest errors first; None without samples of the measure `error`."""
    maps = read_error_maps(runs)
    longest = max((one.row.context or 0 for one in maps), default=None)
    shown = [one for one in maps if (one.row.context or 0) == longest and not is_baseline(one.row)]
    shown = sorted(shown, key=lambda one: float(one.mean.mean()))[:MOST]
    if not shown:
        return None
    names = labels([one.row for one in shown])
    layers = max(len(one.layers) for one in shown)
    figure, grid = figure_of(len(shown), height=0.6 + min(1.8, max(0.5, 0.045 * layers)), columns=COLUMNS)
    norm, image = LogNorm(LOWEST, HIGHEST, clip=True), None
    for axes, one in zip(grid, shown, strict=True):
        image = axes.imshow(one.mean, norm=norm, cmap="cividis_r", aspect="auto", interpolation="nearest")
        title = f"{names[config_of(one.row)]}: {one.mean.mean():.2g}"
        axes.set_title(fitted(title, width(len(shown), COLUMNS), size=8), fontsize=8)
        step = math.ceil(len(one.layers) / 5)
        axes.set_yticks(range(0, len(one.layers), step), [str(layer) for layer in one.layers[::step]], fontsize=7)
        heads = range(0, one.mean.shape[1], math.ceil(one.mean.shape[1] / 8))
        axes.set_xticks(heads, [str(head) for head in heads], fontsize=7)
        axes.grid(visible=False)
    figure.supxlabel("KV head", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    assert image is not None
    bar = plt.colorbar(image, ax=grid, shrink=0.6, extend="both")
    bar.set_label("relative error", fontsize=8)
    said = [f"{names[config_of(one.row)]} {one.mean.mean():.2g}" for one in shown]
    return Plot(figure, f"Mean relative error of the attention output: {name_list(said, 16)}.")


def read_error_maps(runs: Iterable[Path]) -> list[ErrorMap]:
    """The maps of all methods. Of a window measured twice the later one counts; damaged records are left out."""
    found: dict[tuple[Any, ...], ErrorMap] = {}
    for run in runs:
        for record in sample_records(run):
            for row, layers, values in _entries(record):
                key = (config_of(row), row.context, len(layers), values.shape)
                found.setdefault(key, ErrorMap(row, layers)).windows[str(record.get("sha256"))] = values
    return list(found.values())


def _entries(record: Mapping[str, Any]) -> Iterator[tuple[Row, list[int], np.ndarray]]:
    if record.get("measure") != "error" or not isinstance(record.get("context"), int):
        return
    for entry in entries_of(record):
        layers, values = entry.get("layers"), _matrix(entry.get(BY_HEAD))
        if values is not None and isinstance(layers, list) and len(layers) == len(values):
            yield row_of(entry, record, {}), layers, values


def _matrix(values: Any) -> np.ndarray | None:
    """Numbers [layers, heads]; None for anything else."""
    try:
        matrix = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return matrix if matrix.ndim == 2 and matrix.size and np.isfinite(matrix).all() else None
