"""Answers about what was written earlier, by the length of what was written: one panel for each method."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, Config, Line, config_of, layout_of, lines_of
from kvbench.report.compare.names import labels
from kvbench.report.compare.needle_hits import INFORMATIVE
from kvbench.report.figures.layout import Plot, titled
from kvbench.report.figures.method_panels import Curve, counted, extremes, method_panels
from kvbench.results.row import Row

RATE = "answer_rate"
Place = tuple[str | None, int | None]
"""Task and length."""


def answers_by_length(rows: Sequence[Row]) -> Plot | None:
    """Share of right answers, the mean over tasks of which the full cache answers INFORMATIVE or more at that length.

    Of the setting with most methods. None where no such task was measured at two lengths.
    """
    settings: dict[tuple[object, ...], list[Line]] = {}
    for line in lines_of(rows, "stream"):
        if line.value(RATE) is not None:
            settings.setdefault(_setting(line.row), []).append(line)
    here = max(settings.values(), key=lambda lines: len({config_of(line.row) for line in lines}), default=[])
    found = _by_config(here)
    lengths = sorted({length for rates in found.values() for length in rates})
    if len(lengths) < 2:
        return None
    names = labels([line.row for line in here])
    row_of = {config_of(line.row): line.row for line in here}
    curves = [
        Curve(row_of[config], names[config], row_of[config].budget, [(float(at), rates[at]) for at in sorted(rates)])
        for config, rates in found.items()
    ]
    figure = method_panels(curves, "tokens written before the answers", "right answers, %", ticks=lengths)
    figure.axes[0].set_ylim(0, 104)  # the others share its scale
    ends = {curve.label: curve.points[-1][1] for curve in curves}
    says = (
        f"Right answers of {counted(ends, 'method')} after {lengths[-1]:,} tokens: {extremes(ends, '{:.0f}%'.format)}."
    )
    return Plot(titled(figure, here[0].row, rows, "context", "question"), says)


def _setting(row: Row) -> tuple[object, ...]:
    return (*(getattr(row, name) for name in MODEL_AND_DEVICE), layout_of(row))


def _by_config(lines: Sequence[Line]) -> dict[Config, dict[int, float]]:
    """By method and length, the mean of its rates in percent over the informative tasks."""
    full: dict[Place, float] = {_place(line): line.value(RATE) or 0.0 for line in lines if line.baseline}
    rates: dict[Config, dict[int, list[float]]] = {}
    for line in lines:
        if full.get(_place(line), 0.0) >= INFORMATIVE and line.row.context:
            of_config = rates.setdefault(config_of(line.row), {})
            of_config.setdefault(line.row.context, []).append(line.value(RATE) or 0.0)
    return {
        config: {length: 100 * sum(values) / len(values) for length, values in of_config.items()}
        for config, of_config in rates.items()
    }


def _place(line: Line) -> Place:
    return line.row.protocol, line.row.context
