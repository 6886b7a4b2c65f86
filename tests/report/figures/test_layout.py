"""No label, tick or legend covers another."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from matplotlib.text import Text

from kvbench.report.figures.bars import bandwidth_bars, memory_parts, speed_bars
from kvbench.report.figures.by_context import bytes_by_context, tpot_by_context
from kvbench.report.figures.layout import Plot
from kvbench.report.figures.method_panels import kl_by_position, loss_by_window, perplexity_by_budget
from kvbench.report.figures.needle_maps import needle_maps
from kvbench.report.figures.trade_off import difference_by_size, kl_by_size, top1_by_size
from kvbench.results.row import Row
from tests.report.synthetic import crowd, samples, sweep
from tests.shared.rows import rows

DRAWS: tuple[tuple[str, Callable[[], Plot | None]], ...] = (
    ("kl", lambda: kl_by_size(crowd())),
    ("difference", lambda: difference_by_size(crowd())),
    ("top-1", lambda: top1_by_size(crowd())),
    ("speed", lambda: speed_bars(crowd())),
    ("parts", lambda: memory_parts(crowd())),
    ("budget", lambda: perplexity_by_budget(crowd())),
    ("position", lambda: kl_by_position(crowd())),
    ("tpot", lambda: tpot_by_context(crowd())),
    ("memory", lambda: bytes_by_context(crowd())),
    ("bandwidth", lambda: bandwidth_bars(crowd())),
    ("windows", lambda: loss_by_window(samples())),
    ("small difference", lambda: difference_by_size(rows())),
    ("small budget", lambda: perplexity_by_budget(sweep())),
)


@pytest.mark.parametrize("draw", [draw for _, draw in DRAWS], ids=[name for name, _ in DRAWS])
def test_no_label_lies_on_another(draw: Callable[[], Plot | None]) -> None:
    plot = draw()
    assert plot is not None
    figure = plot.figure
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
        texts = [Text.get_window_extent(text, renderer) for text in axes.texts if text.get_text()]  # without leaders
        for one, other in itertools.combinations(texts, 2):
            assert not one.overlaps(other)
        for legend in legends:
            assert not legend.overlaps(axes.get_window_extent())
    for box in [*legends, *titles]:
        assert box.x0 >= figure.bbox.x0 - 1 and box.x1 <= figure.bbox.x1 + 1
        assert box.y0 >= figure.bbox.y0 - 1 and box.y1 <= figure.bbox.y1 + 1


@pytest.mark.parametrize("draw", [needle_maps, tpot_by_context, bytes_by_context])
@pytest.mark.parametrize("made", [rows(), sweep(), rows(contexts=[64, 512, 1024, 2048, 32768], lengths=[1024])])
def test_tick_labels_and_legend_overlap_nothing(draw: object, made: list[Row]) -> None:
    figure = draw(made).figure  # type: ignore[operator]
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [label.get_window_extent(renderer) for label in axis.get_ticklabels() if label.get_text()]
            ticks = [box for box in ticks if box.width and box.height]
            for one, other in itertools.pairwise(ticks):
                assert not one.overlaps(other)
        for legend in figure.legends:
            assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent())
    for legend in figure.legends:
        box, page = legend.get_window_extent(renderer), figure.bbox
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
