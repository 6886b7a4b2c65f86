"""KL by the position of the scored token: does damage grow as the cache is used?"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from kvbench.report.lines import lines_of
from kvbench.report.multiples import Curve, small_multiples
from kvbench.report.names import config_of, labels
from kvbench.report.panels import place_of, titled
from kvbench.report.style import Looks
from kvbench.results.row import Row

METRIC = "kl_at"


def kl_position(rows: Sequence[Row], looks: Looks | None = None) -> Figure | None:
    """A panel a method of the first setting with such rows; None without them."""
    lines = [line for line in lines_of(rows, "perplexity") if not line.baseline and _curve_rows(line.curves)]
    if not lines:
        return None
    first = lines[0].row
    same = [line for line in lines if place_of(line.row) == place_of(first)]
    names = labels([line.row for line in same])
    curves = []
    for line in same:
        points = sorted(_curve_rows(line.curves).items())
        values = [(float(position), row.value) for position, row in points if row.value is not None and row.value > 0]
        if values:
            curves.append(Curve(line.name, names[config_of(line.row)], line.row.budget, values))
    if not curves:
        return None
    figure = small_multiples(curves, "position of the scored token", "KL, nats", looks, logarithmic=True)
    return titled(figure, first, [line.row for line in lines])


def _curve_rows(curves: dict[tuple[str, int | None], dict[int, Row]]) -> dict[int, Row]:
    return next((found for (metric, _), found in curves.items() if metric == METRIC), {})
