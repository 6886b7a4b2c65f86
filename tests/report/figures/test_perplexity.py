"""Perplexity against bytes: points, intervals and their labels."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from kvbench.report.compare.comparison import lines_of
from kvbench.report.compare.names import display_name
from kvbench.report.figures.perplexity import perplexity_bounds, perplexity_by_bytes
from kvbench.report.figures.quality_by_bytes import quality_by_bytes
from kvbench.results.row import Row
from tests.report.synthetic import sweep
from tests.shared.rows import BASE, METHODS, rows


def boxes_of_texts(figure: Figure, axes: Axes) -> list[tuple[str, Bbox]]:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    annotations = [child for child in axes.texts if isinstance(child, Annotation) and child.get_text()]
    return [(label.get_text(), Text.get_window_extent(label, renderer)) for label in annotations]


@pytest.mark.parametrize("made", [rows(), sweep(), rows() + rows(base=replace(BASE, model="org/Other"))])
def test_labels_beside_points_overlap_neither_each_other_nor_a_point(made: list[Row]) -> None:
    figure = perplexity_by_bytes(made)
    assert figure is not None
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = boxes_of_texts(figure, axes)
        texts = {text for text, _ in boxes}
        assert {"full", "kivi4"} <= texts and any(text.startswith("h2o") for text in texts)
        for (_, one), (_, other) in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        frame = axes.get_window_extent()
        for _, box in boxes:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        marked = [line for line in axes.get_lines() if line.get_marker() not in ("None", "", None)]
        for line in marked:
            for point in axes.transData.transform(line.get_xydata()):
                assert not any(box.contains(*point) for _, box in boxes)


def test_a_crowded_sweep_still_names_every_method() -> None:
    swept = [
        (name, store, {"budget": budget}, ppl + 100 / budget, budget / 1024)
        for name, store, _, ppl, _ in METHODS
        if name in ("h2o", "streaming_llm", "random")
        for budget in (64, 96, 128, 192, 256, 384, 512, 640, 768, 896)
    ]
    made = rows([*METHODS[:4], *swept])
    figure = perplexity_by_bytes([*made, *(replace(row, model="org/Other") for row in made)])
    assert figure is not None
    figure.canvas.draw()
    for axes in figure.axes:
        shown = {text for text, _ in boxes_of_texts(figure, axes)}
        assert {method for method, *_ in METHODS[:4]} <= shown
        assert {f"{name} 896" for name in ("h2o", "h2o+int4", "streaming_llm", "random")} <= shown


def test_every_label_that_is_a_method_is_written() -> None:
    figure = perplexity_by_bytes(rows())
    assert figure is not None
    figure.canvas.draw()
    shown = {text for text, _ in boxes_of_texts(figure, figure.axes[0])}
    assert shown == {display_name(Row(method=method, store=store)) for method, store, *_ in METHODS}


def test_bytes_of_another_measure_context_or_run_are_not_drawn() -> None:
    made = [row for row in rows() if row.metric != "scored_bytes"]
    assert perplexity_by_bytes(made) is None and quality_by_bytes(made) is None  # the memory measure has bytes
    other = [replace(row, run="other") if row.metric == "scored_bytes" else row for row in rows()]
    assert perplexity_by_bytes(other) is None and quality_by_bytes(other) is None


def test_axes_of_bytes_say_which_cache_was_measured() -> None:
    for figure in (perplexity_by_bytes(rows()), quality_by_bytes(rows())):
        assert figure is not None
        assert {axes.get_xlabel() for axes in figure.axes} == {"held while scored, MiB\nat context 1,024"}


def test_bytes_of_older_rows_are_those_after_scoring() -> None:
    made = [row for row in rows(measures=["perplexity"]) if row.metric != "scored_bytes"]
    counted = [replace(row, metric="held_bytes", value=2.0**20, batch=4) for row in made if row.metric == "ppl"]
    figure = perplexity_by_bytes([*[replace(row, batch=4) for row in made], *counted])
    assert figure is not None
    marked = [line for line in figure.axes[0].get_lines() if line.get_marker() not in ("None", "", None)]
    held = np.concatenate([np.asarray(line.get_xydata())[:, 0] for line in marked])
    assert set(held.tolist()) == {256.0}  # KiB per sequence


def test_a_perplexity_carries_the_interval_of_its_paired_difference() -> None:
    made = rows(METHODS[:4], ["perplexity"])
    for line in lines_of(made, "perplexity"):
        low, high = perplexity_bounds(line)
        value = line.value("ppl") or 0
        reach = 0.0 if line.baseline else 0.01
        assert (low, high) == pytest.approx((value * math.exp(-reach), value * math.exp(reach)))
    unpaired = [row for row in made if row.metric == "ppl"]
    assert perplexity_bounds(lines_of(unpaired, "perplexity")[1]) == pytest.approx((22.312 * 0.96, 22.312 * 1.05))


def test_many_names_stand_in_a_legend_and_all_panels_share_their_bytes() -> None:
    made = [(f"method_{i}", "dense", {"budget": 64.0}, 22.4 + i, 0.1 + i / 30) for i in range(20)]
    figure = perplexity_by_bytes(rows([METHODS[0], *made]))
    assert figure is not None and len(figure.legends[0].get_texts()) == 21 and not figure.axes[0].texts
    figure = quality_by_bytes(rows())
    assert figure is not None
    assert len({tuple(np.round(axes.get_xlim(), 6)) for axes in figure.axes}) == 1
