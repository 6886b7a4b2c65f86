"""Hits by turn: a panel for each method, both times of the first question in it."""

from __future__ import annotations

from pathlib import Path

from kvbench.report.figures.all_figures import draw_all
from kvbench.report.figures.turns import turns
from tests.report.tables.test_turn_tables import AFTER, BEFORE, made


def test_a_curve_for_each_method_and_time() -> None:
    plot = turns([*made("after", AFTER), *made("before", BEFORE)])
    assert plot is not None
    panels = plot.figure.axes
    assert [axes.get_title() for axes in panels] == ["full: after, before", "snapkv: after, before", "kvzip"]
    coloured = [line for line in panels[1].lines if line.get_linewidth() > 1]
    assert [list(line.get_ydata()) for line in coloured] == [AFTER["snapkv"], BEFORE["snapkv"]]
    assert list(coloured[0].get_xdata()) == [1, 2, 3]
    low, high = panels[0].get_ylim()
    assert low < 0 and high > 1  # hits of 0% and 100% are whole markers
    assert "snapkv before 80.0% to 30.0%" in plot.says


def test_the_task_with_most_methods_is_drawn() -> None:
    few = {"full": [1.0, 1.0], "h2o": [0.0, 1.0]}
    plot = turns([*made("after", few, "variables/independent"), *made("after", AFTER, "key_value/conversation")])
    assert plot is not None and plot.figure.get_supxlabel() == "turn (key value, conversation)"


def test_one_turn_is_no_figure(tmp_path: Path) -> None:
    single = [row for row in made("after", AFTER) if row.position in (None, 1)]
    assert turns(single) is None and turns([]) is None
    assert [plot.file for plot in draw_all(made("after", AFTER), tmp_path)] == ["turns.png"]
