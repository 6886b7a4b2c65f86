"""Verdict of each method against the full cache from its windows: within a margin, worse, or not enough data.

The unit is the window. Intervals in rows resample blocks of 16 tokens, so they cover the scored windows only, and no
verdict is made from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.report.compare.comparison import comparison_key, config_of
from kvbench.report.compare.window_samples import WindowSample
from kvbench.results.paired import FEWEST_UNITS, MARGIN, Verdict, verdicts
from kvbench.results.row import Row

WindowKey = tuple[Any, ...]
"""Model and device, method with its knobs, context and protocol."""
MARGIN_TEXT = f"{MARGIN:g} nats"
HOW = (
    f"verdict: within margin where the 95% interval of the mean ΔNLL over windows ends below {MARGIN_TEXT}, worse "
    f"where it lies above 0 and reaches {MARGIN_TEXT}; none below {FEWEST_UNITS} windows"
)
"""The rule of the verdicts, for captions."""
NO_SAMPLES = "its windows are not in samples.jsonl, and an interval over 16-token blocks covers these windows only"


@dataclass(frozen=True)
class MethodWindows:
    """The windows of one method. row: the method with its knobs. differences: by window, NLL minus the full cache's."""

    row: Row
    differences: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowEvidence:
    """What the windows show. windows, verdicts: by `window_key`; empty without samples."""

    windows: Mapping[WindowKey, MethodWindows] = field(default_factory=dict)
    verdicts: Mapping[WindowKey, Verdict] = field(default_factory=dict)

    def verdict_of(self, row: Row | None) -> Verdict | None:
        """The verdict for the method, context and protocol of a row; None without samples."""
        if row is None:
            return None
        older = replace(row, protocol=None)  # samples of older runs name no protocol
        return self.verdicts.get(window_key(row)) or self.verdicts.get(window_key(older))


NO_EVIDENCE = WindowEvidence()


def window_key(row: Row) -> WindowKey:
    """Equal for a row of perplexity and the samples of the same method, model, device, context and protocol."""
    return (*comparison_key(row, across_measures=True), *config_of(row), row.context, row.protocol)


def evidence_of(samples: Iterable[WindowSample]) -> WindowEvidence:
    """Gather the windows of each method and give its verdict."""
    found: dict[WindowKey, MethodWindows] = {}
    for sample in samples:
        method = found.setdefault(window_key(sample.row), MethodWindows(sample.row))
        method.differences[sample.window] = sample.difference
    given = verdicts([list(method.differences.values()) for method in found.values()])
    return WindowEvidence(found, dict(zip(found, given, strict=True)))


def verdict_cell(verdict: Verdict | None) -> str:
    """The verdict as a cell of a table: `worse`, `not enough data (8 windows; at least 10 needed)`."""
    if verdict is None:
        return "–"
    if verdict.kind == "worse":
        return "worse"
    if verdict.kind == "within_margin":
        return "within margin, with a loss" if verdict.shows_loss else "within margin"
    return verdict.text()


def verdict_record(verdict: Verdict | None) -> dict[str, Any]:
    """The verdict with its unrounded numbers, for the CSV."""
    if verdict is None:
        return {}
    numbers = {"mean": verdict.mean, "low": verdict.low, "high": verdict.high, "windows": verdict.n}
    record = {f"verdict_{name}": value for name, value in (numbers | {"windows_needed": verdict.needed}).items()}
    return {"verdict": verdict.kind, **record, "verdict_margin": verdict.margin}
