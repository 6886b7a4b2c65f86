"""Quality against x smaller than 16-bit: points, fronts, clipped methods and labels."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.names import display_name
from kvbench.report.compare.window_intervals import window_intervals
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.figures.layout import Plot
from kvbench.report.figures.loss_axis import HOPELESS, loss_axis
from kvbench.report.figures.trade_off import (
    DIFFERENCE,
    KL,
    MOST_LABELS,
    TradeOff,
    crowded,
    difference_by_size,
    front_of,
    kl_by_size,
    top1_by_size,
    trade_offs,
)
from kvbench.results.row import Row
from tests.report.synthetic import crowd, sweep
from tests.shared.rows import BASE, METHODS, rows

FLAT = [method for method in METHODS if method[0] != "random"]
"""Without the method whose loss is beyond the axis."""


def drawn(plot: Plot | None) -> Figure:
    assert plot is not None
    plot.figure.canvas.draw()
    return plot.figure


def boxes_of_texts(figure: Figure, axes: Axes) -> list[tuple[str, Bbox]]:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    annotations = [child for child in axes.texts if isinstance(child, Annotation) and child.get_text()]
    return [(label.get_text(), Text.get_window_extent(label, renderer)) for label in annotations]


@pytest.mark.parametrize("made", [rows(), sweep(), crowd(), rows() + rows(base=replace(BASE, model="org/Other"))])
def test_every_line_is_named_and_labels_overlap_neither_each_other_nor_a_point(made: list[Row]) -> None:
    figure = drawn(difference_by_size(made))
    for axes in figure.axes:
        boxes = boxes_of_texts(figure, axes)
        named = " ".join([axes.get_title(), *(text for text, _ in boxes)]).replace("\u00a0", " ")
        for name in {display_name(row) for row in made if row.method}:
            assert name in named, f"{name} is not named"
        for (_, one), (_, other) in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        frame = axes.get_window_extent()
        for _, box in boxes:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        for line in axes.get_lines():
            if line.get_marker() not in ("None", "", None):
                for point in axes.transData.transform(line.get_xydata()):
                    assert not any(box.contains(*point) for _, box in boxes)


def test_a_hopeless_method_stands_at_the_edge_and_is_named_above_it_with_its_value() -> None:
    figure = drawn(difference_by_size(rows()))
    (axes,) = figure.axes
    assert axes.get_title().replace("\u00a0", " ") == "beyond 0.5 nats: random +0.697"
    assert axes.get_ylim()[1] == HOPELESS
    highest = max(y for line in axes.get_lines() if line.get_marker() == "X" for _, y in line.get_xydata())
    assert highest == HOPELESS


def test_nothing_is_clipped_where_nearly_everything_is_hopeless() -> None:
    bad = [(name, store, knobs, 99.0, share) for name, store, knobs, _, share in METHODS[1:]]
    figure = drawn(difference_by_size(rows([METHODS[0], *bad])))
    assert figure.axes[0].get_title() == "" and figure.axes[0].get_ylim()[1] > 1.4


def test_the_axis_names_the_context_and_when_bytes_were_counted() -> None:
    for draw in (kl_by_size, difference_by_size, top1_by_size):
        (axes,) = drawn(draw(rows())).axes
        assert axes.get_xlabel() == "x smaller than a 16-bit full cache\nmean while scored, at context 1,024"


def test_older_rows_get_x_smaller_from_the_bytes_after_scoring() -> None:
    older = [row for row in rows() if row.metric not in ("x_smaller", "scored_bytes")]
    held = [row for row in rows() if row.metric == "scored_bytes"]
    older += [replace(row, metric="held_bytes") for row in held]
    (group,) = groups_of(older)
    found = {point.label: point.smaller for point in trade_offs(group, KL)}
    assert found == pytest.approx({point.label: point.smaller for point in trade_offs(groups_of(rows())[0], KL)})
    assert found["full"] == 0.5  # float32
    assert "after scoring" in drawn(kl_by_size(older)).axes[0].get_xlabel()


def test_bytes_of_another_run_measure_or_dtype_are_not_drawn() -> None:
    other = [replace(row, run="other") if row.metric == "x_smaller" else row for row in rows()]
    assert kl_by_size(other) is None
    assert kl_by_size([row for row in rows() if row.metric not in ("x_smaller", "scored_bytes")]) is None
    unknown = [replace(row, dtype=None) for row in rows() if row.metric != "x_smaller"]
    assert kl_by_size(unknown) is None


def points_of(*found: tuple[str, float, float]) -> list[TradeOff]:
    row = replace(BASE, store="dense", budget=64.0)
    return [TradeOff(name, x, y, y, y, replace(row, method=name), row) for name, x, y in found]


def test_the_front_holds_the_points_that_no_other_beats_and_none_that_sees_the_future() -> None:
    points = points_of(("a", 8, 5), ("b", 4, 6), ("c", 4, 3), ("d", 2, 3), ("e", 1, 1), ("hindsight", 9, 0))
    assert [point.label for point in front_of(points)] == ["a", "c", "e"]
    assert [point.label for point in front_of(points, "high")] == ["a", "b"]


def test_of_many_methods_the_crowded_ones_are_named_above_the_panel() -> None:
    """Those on the front keep their labels, and so does a lonely one."""
    cluster = [(f"m{i:02}", 3 + 0.001 * i, 0.100 + 0.001 * i) for i in range(MOST_LABELS + 6)]
    points = points_of(*cluster, ("front", 4.0, 0.01), ("lonely", 1.2, 3.0))
    left_out = {point.label for point in crowded(points, KL)}
    assert len(points) - len(left_out) == MOST_LABELS
    assert not left_out & {"front", "lonely"}
    assert crowded(points[:MOST_LABELS], KL) == []


def test_intervals_are_over_windows_not_over_blocks() -> None:
    made = rows(FLAT, ["perplexity"])
    h2o = next(row for row in made if row.method == "h2o" and row.store == "dense" and row.metric == "nll_minus_full")
    assert h2o.low is not None and h2o.value is not None
    (group,) = groups_of(made)
    plain = {point.label: point for point in trade_offs(group, DIFFERENCE)}
    assert plain["h2o"].low == plain["h2o"].high == h2o.value  # its own interval is over 16-token blocks
    windows = [WindowSample(h2o, str(place), 0.05 + 0.02 * (-1) ** place, scores={"kl": 0.03}) for place in range(16)]
    known = {point.label: point for point in trade_offs(group, DIFFERENCE, window_intervals(windows))}
    # t(15) / sqrt(15) = 0.5502 for differences one spread above and below the mean.
    assert (known["h2o"].low, known["h2o"].high) == pytest.approx(
        (0.05 - 0.02 * 0.5502, 0.05 + 0.02 * 0.5502), abs=1e-4
    )
    assert known["kivi4"].low == known["kivi4"].value


def test_a_line_joins_budgets_of_one_method_only() -> None:
    other = [
        replace(row, variant="max", budget=None if row.budget is None else row.budget + 7)
        for row in sweep()
        if row.method == "h2o"
    ]
    (axes,) = drawn(difference_by_size([*sweep(), *other])).axes
    joined = [line for line in axes.get_lines() if line.get_linewidth() == 0.9 and line.get_marker() in ("None", "")]
    # Smallest losses of each line: those of the two variants are equal, those of streaming_llm larger.
    assert len(joined) == 3 and {len(line.get_xydata()) for line in joined} <= {3, 4}


@pytest.mark.parametrize("lowest", [0.2, 0.5, 0.9, 0.99])
def test_no_tick_lies_above_100_percent(lowest: float) -> None:
    figure = drawn(
        top1_by_size([replace(r, value=lowest) if r.metric == "top1" and r.method == "h2o" else r for r in rows()])
    )
    axis = figure.axes[0].yaxis
    inside = [tick for tick in axis.get_majorticklocs() if tick <= figure.axes[0].get_ylim()[1]]
    assert inside and max(inside) <= 1


def test_a_loss_axis_clips_intervals_but_no_value_below_zero() -> None:
    axis = loss_axis("low", [(0.001, -0.5, 0.2), (-0.05, -0.06, 0.0)], logarithmic=False)
    assert axis.bottom < -0.05 and axis.bottom > -0.1
    assert np.isfinite([axis.bottom, axis.top]).all()
