"""NLL above the full cache's by window, sorted: means hide samples that collapse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.figure import Figure

from kvbench.report.multiples import Curve, small_multiples
from kvbench.report.names import config_of, display_name, labels
from kvbench.report.panels import place_of, titled
from kvbench.report.samples import Sample
from kvbench.report.style import Looks

FEWEST = 2  # windows


def window_differences(samples: Sequence[Sample], looks: Looks | None = None) -> Figure | None:
    """A panel a method in the setting with most windows; None where no method has two of them."""
    places = Counter(place_of(sample.row) for sample in samples)
    if not places:
        return None
    here = [sample for sample in samples if place_of(sample.row) == places.most_common(1)[0][0]]
    names = labels([sample.row for sample in here])
    found: dict[str, list[Sample]] = {}
    for sample in here:
        found.setdefault(names[config_of(sample.row)], []).append(sample)
    curves = []
    for label, members in found.items():
        values = sorted(sample.difference for sample in members)
        if len(values) >= FEWEST:
            row = members[0].row
            curves.append(Curve(display_name(row), label, row.budget, [(i + 1.0, v) for i, v in enumerate(values)]))
    if not curves:
        return None
    figure = small_multiples(curves, "window, sorted", "NLL above full, nats", looks, zero=True)
    return titled(figure, here[0].row, [sample.row for sample in samples])
