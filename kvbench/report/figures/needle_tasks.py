"""Needles found by task: methods by tasks, as shares. Drawn where several tasks were run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, Line, config_of, layout_of, lines_of
from kvbench.report.compare.names import labels
from kvbench.report.compare.needle_hits import INFORMATIVE, Hits, hits_of, total
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Plot, titled
from kvbench.report.figures.needle_maps import COLOURS, GREY
from kvbench.report.figures.style import INK, WIDTH, ink_on
from kvbench.results.row import Row

Task = tuple[str | None, str | None]
"""Protocol, and whether the question stands after or before the text."""
MOST_METHODS = 40
"""Lines that fit a page: the first ones."""
MOST_TASKS = 26
MOST_SAID = 8


def needle_tasks(rows: Sequence[Row]) -> Plot | None:
    """Share of needles found over all lengths and depths, for the setting of the first line. None with one task."""
    every = [line for line in lines_of(rows, "needle", by_context=False) if hits_of(line)]
    lines = [line for line in every if _setting(line) == _setting(every[0])]
    tasks = list(dict.fromkeys(_task(line) for line in lines))[:MOST_TASKS]
    if len({protocol for protocol, _ in tasks}) < 2:
        return None
    names = labels([line.row for line in lines])
    found: dict[str, dict[Task, Hits]] = {}
    for line in lines:
        hits = total(hits_of(line).values())
        if hits is not None:
            found.setdefault(names[config_of(line.row)], {})[_task(line)] = hits
    shown = dict(list(found.items())[:MOST_METHODS])
    base = next((names[config_of(line.row)] for line in lines if line.baseline), None)
    figure, axes = plt.subplots(figsize=(WIDTH, 1.5 + 0.17 * len(shown)))
    _map(axes, shown, tasks, {} if base is None else found[base])
    questions = len({question for _, question in tasks}) > 1
    names_of_tasks = [_name(task, questions=questions) for task in tasks]
    axes.set_xticks(range(len(tasks)), names_of_tasks, rotation=40, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_yticks(range(len(shown)), [layout.shortened(name, 40) for name in shown], fontsize=7)
    more = f" {len(shown)} of {len(found)} methods are drawn." if len(found) > len(shown) else ""
    says = f"{len(tasks)} tasks, needles found over all: {_said(found, base)}.{more}"
    return Plot(titled(figure, lines[0].row, [line.row for line in every], "question", "context"), says)


def _setting(line: Line) -> tuple[object, ...]:
    return (*(getattr(line.row, name) for name in MODEL_AND_DEVICE), layout_of(line.row))


def _task(line: Line) -> Task:
    return line.row.protocol, line.row.question


def _name(task: Task, *, questions: bool) -> str:
    protocol, question = task
    name = layout.shortened((protocol or "?").replace("_", " "), 24)
    return f"{name}, {question}" if questions and question else name


def _map(
    axes: Axes, found: Mapping[str, Mapping[Task, Hits]], tasks: Sequence[Task], full: Mapping[Task, Hits]
) -> None:
    rates = [[own[task].rate if task in own else float("nan") for task in tasks] for own in found.values()]
    axes.imshow(rates, cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
    for x, task in enumerate(tasks):
        bad = task in full and full[task].rate < INFORMATIVE
        if bad:
            corner = (x - 0.5, -0.5)
            cover = Rectangle(corner, 1, len(found), facecolor=GREY, edgecolor="#AAAAAA", hatch="////", linewidth=0)
            axes.add_patch(cover)
        for y, own in enumerate(found.values()):
            if task in own:
                ink = INK if bad else ink_on(*plt.get_cmap(COLOURS)(own[task].rate)[:3])
                box = {"facecolor": GREY, "edgecolor": "none", "pad": 0.4} if bad else None
                text = f"{100 * own[task].rate:.0f}"
                axes.text(x, y, text, ha="center", va="center", fontsize=6, color=ink, bbox=box)
    for x in range(1, len(tasks)):
        axes.axvline(x - 0.5, color="white", linewidth=1)
    for y in range(1, len(found)):
        axes.axhline(y - 0.5, color="white", linewidth=1)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("needles found, %", fontsize=8, loc="left")


def _said(found: Mapping[str, Mapping[Task, Hits]], base: str | None) -> str:
    sums = {name: hits for name, own in found.items() if (hits := total(own.values())) is not None}
    order = sorted(sums, key=lambda name: (name != base, -sums[name].rate))[: MOST_SAID + 1]
    return ", ".join(f"{name} {sums[name]}" for name in order)
