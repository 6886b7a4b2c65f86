"""Figures as images: no label lies on another, every method can be told apart, also without red or green."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvbench.report.budgets import perplexity_budget
from kvbench.report.curves import memory_context, tpot_context
from kvbench.report.differences import window_differences
from kvbench.report.lines import lines_of
from kvbench.report.names import display_name
from kvbench.report.page import write_report
from kvbench.report.panels import styled
from kvbench.report.pareto import bounds_of, perplexity_bytes
from kvbench.report.plots import draw_all
from kvbench.report.positions import kl_position
from kvbench.report.quality import pareto_front, quality_bytes
from kvbench.report.roofline import bandwidth_bars
from kvbench.report.samples import Sample, read_samples
from kvbench.report.style import PALETTE, styles
from kvbench.results.row import Row
from tests.report.test_report import run_of, sweep
from tests.shared.rows import BASE, METHODS, rows


@pytest.fixture(autouse=True)
def paper() -> Iterator[None]:
    with styled():
        yield
    plt.close("all")


def crowd() -> list[Row]:
    """Six keep rules at four budgets beside the fixed methods: more than one panel can hold."""
    fixed = [method for method in METHODS if method[0] in ("full", "kivi8", "kivi4", "kivi2")]
    names = ("h2o", "streaming_llm", "random", "tova", "snapkv", "expected_attention")
    swept = [
        (name, "dense", {"budget": budget}, 22.4 + 100 * (place + 1) / budget, budget / 1024)
        for place, name in enumerate(names)
        for budget in (64.0, 128.0, 256.0, 512.0)
    ]
    made = rows([*fixed, *swept], contexts=(512, 2048), lengths=(1024,))
    at = [row for row in made if row.metric == "kl" and row.value]
    return made + [replace(row, metric="kl_at", position=1024 + 16 * i) for row in at for i in range(8)]


def samples() -> list[Sample]:
    rule = [replace(BASE, method=name, store="dense", budget=256.0, context=1024) for name in ("h2o", "random", "tova")]
    return [Sample(row, str(i), 0.01 * i * (1 + place)) for place, row in enumerate(rule) for i in range(6)]


DRAWS: tuple[tuple[str, Callable[[], Figure | None]], ...] = (
    ("quality", lambda: quality_bytes(crowd())),
    ("budget", lambda: perplexity_budget(crowd())),
    ("position", lambda: kl_position(crowd())),
    ("tpot", lambda: tpot_context(crowd())),
    ("memory", lambda: memory_context(crowd())),
    ("bandwidth", lambda: bandwidth_bars(crowd())),
    ("windows", lambda: window_differences(samples())),
    ("small quality", lambda: quality_bytes(rows())),
    ("small budget", lambda: perplexity_budget(sweep())),
)


@pytest.mark.parametrize("draw", [draw for _, draw in DRAWS], ids=[name for name, _ in DRAWS])
def test_no_label_lies_on_another(draw: Callable[[], Figure | None]) -> None:
    figure = draw()
    assert figure is not None
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    legends = [legend.get_window_extent(renderer) for legend in figure.legends]
    titles = [axes.title.get_window_extent(renderer) for axes in figure.axes if axes.get_title()]
    for one, other in itertools.combinations(titles, 2):
        assert not one.overlaps(other)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
            ticks = [label.get_window_extent(renderer) for label in labels]
            for one, other in itertools.pairwise([box for box in ticks if box.width]):
                assert not one.overlaps(other)
        texts = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
        for one, other in itertools.combinations(texts, 2):
            assert not one.overlaps(other)
        for legend in legends:
            assert not legend.overlaps(axes.get_window_extent())
    for box in [*legends, *titles]:
        assert box.x0 >= figure.bbox.x0 - 1 and box.x1 <= figure.bbox.x1 + 1
        assert box.y0 >= figure.bbox.y0 - 1 and box.y1 <= figure.bbox.y1 + 1


def test_every_method_has_its_panel_in_its_colour() -> None:
    made = crowd()
    looks = styles(display_name(row) for row in made)
    figure = kl_position(made, looks)
    assert figure is not None
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert set(panels) == {display_name(row) for row in made} - {"full"}
    for name, axes in panels.items():
        assert to_rgb(axes.title.get_color()) == to_rgb(looks[name].colour)
        strongest = max(axes.get_lines(), key=lambda line: (line.get_zorder(), line.get_linewidth()))
        assert strongest.get_marker() == looks[name].marker


def test_a_method_looks_the_same_in_every_figure() -> None:
    made = crowd()
    looks = styles(display_name(row) for row in made)
    for draw in (quality_bytes, perplexity_budget):
        figure = draw(made, looks)
        assert figure is not None
        for line in figure.legends[0].get_lines():
            assert to_rgb(line.get_color()) == to_rgb(looks[str(line.get_label())].colour)


# Machado, Oliveira and Fernandes (2009): full deuteranopia and protanopia, on linear RGB.
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


def test_a_perplexity_carries_the_interval_of_its_paired_difference() -> None:
    made = rows(METHODS[:4], ["perplexity"])
    for line in lines_of(made, "perplexity"):
        low, high = bounds_of(line)
        value = line.value("ppl") or 0
        reach = 0.0 if line.baseline else 0.01
        assert (low, high) == pytest.approx((value * math.exp(-reach), value * math.exp(reach)))
    unpaired = [row for row in made if row.metric == "ppl"]
    assert bounds_of(lines_of(unpaired, "perplexity")[1]) == pytest.approx((22.312 * 0.96, 22.312 * 1.05))


def test_many_names_stand_in_a_legend_and_all_panels_share_their_bytes() -> None:
    made = [(f"method_{i}", "dense", {"budget": 64.0}, 22.4 + i, 0.1 + i / 30) for i in range(20)]
    figure = perplexity_bytes(rows([METHODS[0], *made]))
    assert figure is not None and len(figure.legends[0].get_texts()) == 21 and not figure.axes[0].texts
    figure = quality_bytes(rows())
    assert figure is not None
    assert len({tuple(np.round(axes.get_xlim(), 6)) for axes in figure.axes}) == 1


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    points = [(1.0, 5.0), (2.0, 6.0), (2.0, 3.0), (4.0, 3.0), (8.0, 1.0)]
    assert pareto_front(points) == [(1.0, 5.0), (2.0, 3.0), (8.0, 1.0)]
    assert pareto_front(points, "high") == [(1.0, 5.0), (2.0, 6.0)]


def test_samples_are_paired_and_the_last_measurement_of_a_window_counts(tmp_path: Path) -> None:
    window = {"measure": "perplexity", "context": 64, "sha256": "a"}
    full = {"method": "full", "store": "dense", "knobs": {}, "nll": 3.0}
    for nll in (3.5, 3.25):
        run = run_of(tmp_path, [])
        h2o = {"method": "h2o", "store": "dense", "knobs": {"budget": 32, "seed": 0, "decode": "evict"}, "nll": nll}
        run.add_samples([window | {"methods": [full, h2o]}, {"measure": "needle"}])
    found = read_samples(sorted(path for path in tmp_path.iterdir()))
    assert [(sample.row.method, sample.row.budget) for sample in found] == [("h2o", 32.0)]
    assert found[0].difference in (0.5, 0.25)


def test_one_window_under_two_models_is_two_samples(tmp_path: Path) -> None:
    made = [replace(BASE, method="full", store="dense", measure="perplexity", metric="ppl", value=2.0)]
    for name, nll in (("org/A", 3.5), ("org/B", 3.25)):
        run = run_of(tmp_path, [replace(row, model=name) for row in made])
        scored = [{"method": method, "store": "dense", "nll": one} for method, one in (("full", 3.0), ("h2o", nll))]
        window = {"measure": "perplexity", "context": 64, "methods": scored}
        run.add_samples([window | {"sha256": place} for place in "ab"])
    found = read_samples(sorted(tmp_path.iterdir()))
    assert {(sample.row.model, sample.difference) for sample in found} == {("org/A", 0.5), ("org/B", 0.25)}
    figure = window_differences(found)
    assert figure is not None and figure.get_suptitle() in ("A", "B")


def test_of_many_settings_a_few_are_drawn_and_the_caption_says_so(tmp_path: Path) -> None:
    made = [row for seed in range(6) for row in rows(METHODS[:2], ["memory"], base=replace(BASE, model=f"org/M{seed}"))]
    (plot,) = draw_all(made, tmp_path)
    assert "4 of 6 models" in plot.caption


def many(count: int) -> Sequence[Row]:
    models = itertools.count()
    made: list[Row] = []
    while len(made) < count:
        made += rows(base=replace(BASE, model=f"org/Model-{next(models)}"))
    return made


@pytest.mark.slow
def test_ten_thousand_rows_take_less_than_twenty_seconds(tmp_path: Path) -> None:
    run = run_of(tmp_path, many(10_000))
    before = time.process_time()
    page = write_report([run.path], tmp_path / "report")
    assert time.process_time() - before < 20
    assert page.stat().st_size > 1_000_000
