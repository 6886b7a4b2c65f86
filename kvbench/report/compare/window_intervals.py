"""95% intervals over windows of a method's numbers: what a figure may draw as the uncertainty for other text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvbench.report.compare.window_samples import WindowKey, WindowSample, window_key
from kvbench.results.paired import interval
from kvbench.results.row import Row

DIFFERENCE = "nll_minus_full"
SCORES = ("kl", "top1")


@dataclass(frozen=True)
class WindowIntervals:
    """Low, high and number of windows by method and metric; empty without samples."""

    known: Mapping[tuple[WindowKey, str], tuple[float, float, int]] = field(default_factory=dict)

    def of(self, row: Row) -> tuple[float, float, int] | None:
        """The interval of a row's metric; None if its windows are not known or are fewer than two."""
        own = self.known.get((window_key(row), row.metric or ""))
        # Samples of older runs name no protocol.
        return own or self.known.get((window_key(replace(row, protocol=None)), row.metric or ""))


NO_INTERVALS = WindowIntervals()


def window_intervals(samples: Iterable[WindowSample]) -> WindowIntervals:
    """Intervals of the paired NLL difference, and of KL and top-1 agreement, with the window as the unit."""
    values: dict[tuple[WindowKey, str], dict[str, float]] = {}
    for sample in samples:
        key = window_key(sample.row)
        values.setdefault((key, DIFFERENCE), {})[sample.window] = sample.difference
        for name in SCORES:
            if name in sample.scores:
                values.setdefault((key, name), {})[sample.window] = sample.scores[name]
    found = {key: (interval(list(own.values())), len(own)) for key, own in values.items()}
    return WindowIntervals({key: (*bounds, n) for key, (bounds, n) in found.items() if bounds is not None})
