"""Every method can be told apart, also without red or green."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from kvbench.report.compare.names import display_name
from kvbench.report.figures.method_panels import kl_by_position
from kvbench.report.figures.perplexity import perplexity_by_budget
from kvbench.report.figures.quality_by_bytes import quality_by_bytes
from kvbench.report.figures.style import PALETTE, styles
from tests.report.synthetic import crowd

SHIPPED = (
    "recompute",
    "kivi8",
    "kivi4",
    "kivi2",
    "h2o",
    "streaming_llm",
    "random",
    "snapkv",
    "tova",
    "knorm",
    "expected_attention",
    "adakv",
)


def test_colours_are_distinct_and_stable_for_twelve_methods() -> None:
    found = styles(["full", *SHIPPED])
    assert len({found[name].colour for name in ("full", *SHIPPED)}) == 13
    for name in SHIPPED:  # the colour does not depend on who else is there
        assert styles([name])[name] == styles([name, "full", "h2o+int4"])[name] == found[name]


def test_any_24_methods_are_distinguishable() -> None:
    names = [f"method_{index}+int4" for index in range(24)]
    found = styles(names)
    assert len({(found[name].colour, found[name].marker, found[name].hollow) for name in names}) == 24
    assert len({found[name].colour for name in names[: len(PALETTE)]}) <= len(PALETTE)


BLIND = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def lab(colour: str, matrix: object) -> NDArray[np.float64]:
    """CIE L*a*b* (D65) of a colour as it is seen through the matrix."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.asarray(matrix) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    scaled = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", BLIND)
def test_colours_stay_apart(sight: str) -> None:
    for one, other in itertools.combinations(("#222222", *PALETTE), 2):
        distance = float(np.linalg.norm(lab(one, BLIND[sight]) - lab(other, BLIND[sight])))
        assert distance > 8, f"{one} and {other} are {distance:.1f} apart under {sight}"


def test_where_colours_repeat_the_markers_differ() -> None:
    found = styles(["full", *(f"method_{i}" for i in range(24))])
    looks = [(style.colour, style.marker, style.hollow) for style in found.values()]
    assert len(set(looks)) == len(looks)


def test_a_method_looks_the_same_in_every_figure() -> None:
    made = crowd()
    looks = styles(display_name(row) for row in made)
    for draw in (quality_by_bytes, perplexity_by_budget):
        figure = draw(made, looks)
        assert figure is not None
        for line in figure.legends[0].get_lines():
            assert to_rgb(line.get_color()) == to_rgb(looks[str(line.get_label())].colour)


def test_every_method_has_its_panel_in_its_colour() -> None:
    made = crowd()
    looks = styles(display_name(row) for row in made)
    figure = kl_by_position(made, looks)
    assert figure is not None
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert set(panels) == {display_name(row) for row in made} - {"full"}
    for name, axes in panels.items():
        assert to_rgb(axes.title.get_color()) == to_rgb(looks[name].colour)
        strongest = max(axes.get_lines(), key=lambda line: (line.get_zorder(), line.get_linewidth()))
        assert strongest.get_marker() == looks[name].marker
