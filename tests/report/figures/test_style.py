"""Families can be told apart, also without red or green, and every method is drawn in its family's colour."""

from __future__ import annotations

import itertools
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import NDArray

from kvbench.report.compare.method_kinds import FAMILIES
from kvbench.report.compare.names import display_name
from kvbench.report.figures.method_panels import kl_by_position
from kvbench.report.figures.style import COLOURS, INK, MARKERS, colour_of, ink_on, mark_of
from tests.report.synthetic import crowd
from tests.shared.rows import BASE

BLIND = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def linear_of(colour: str) -> NDArray[np.float64]:
    rgb = np.array(to_rgb(colour))
    linear: NDArray[np.float64] = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear


def lab(colour: str, matrix: object) -> NDArray[np.float64]:
    """CIE L*a*b* (D65) of a colour as it is seen through the matrix."""
    linear = np.clip(np.asarray(matrix) @ linear_of(colour), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    scaled = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", BLIND)
def test_colours_stay_apart(sight: str) -> None:
    for one, other in itertools.combinations(COLOURS.values(), 2):
        distance = float(np.linalg.norm(lab(one, BLIND[sight]) - lab(other, BLIND[sight])))
        assert distance > 8, f"{one} and {other} are {distance:.1f} apart under {sight}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_a_mark_of_its_own_and_a_colour_that_is_legible_as_text(family: str) -> None:
    luminance = float(linear_of(COLOURS[family]) @ (0.2126, 0.7152, 0.0722))
    assert 1.05 / (luminance + 0.05) >= 4.5
    assert list(MARKERS.values()).count(MARKERS[family]) == 1


@pytest.mark.parametrize("name", ["cividis", "RdBu_r"])
def test_numbers_in_heat_maps_are_legible_on_every_colour(name: str) -> None:
    for share in np.linspace(0, 1, 101):
        red, green, blue, _ = plt.get_cmap(name)(share)
        luminance = float(linear_of(to_hex((red, green, blue))) @ (0.2126, 0.7152, 0.0722)) + 0.05
        contrast = 1.05 / luminance if ink_on(red, green, blue) == "white" else luminance / 0.05
        assert contrast >= 4.5


def test_a_method_that_sees_the_future_is_hollow() -> None:
    assert mark_of(replace(BASE, method="hindsight", budget=256.0))["markerfacecolor"] == "white"
    assert mark_of(replace(BASE, method="h2o", budget=256.0))["markerfacecolor"] == COLOURS["score"]


def test_every_method_has_its_panel_in_the_colour_of_its_family_under_a_legible_title() -> None:
    made = crowd()
    plot = kl_by_position(made)
    assert plot is not None
    panels = {axes.get_title().split(":")[0].replace("\n", " "): axes for axes in plot.figure.axes}
    rows = {display_name(row): row for row in made if display_name(row) != "full"}
    assert set(panels) == set(rows)
    for name, axes in panels.items():
        assert to_rgb(axes.title.get_color()) == to_rgb(INK)
        strongest = max(axes.get_lines(), key=lambda line: (line.get_zorder(), line.get_linewidth()))
        own = [line for line in axes.get_lines() if line.get_marker() == strongest.get_marker()]
        assert to_rgb(own[-1].get_color()) == pytest.approx(to_rgb(colour_of(rows[name])), abs=0.01)
