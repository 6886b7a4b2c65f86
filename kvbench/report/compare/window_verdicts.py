"""Verdict of each method against the full cache from its windows: within a margin, worse, or not enough data.

The unit is the window. Intervals in rows resample blocks of 16 tokens, so they cover the scored windows only, and no
verdict is made from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.report.compare.comparison import comparison_key, is_baseline
from kvbench.report.compare.method_families import LARGEST, MethodFamily, families_of
from kvbench.report.compare.window_samples import MethodWindows, WindowKey, WindowSample, by_method, by_text, window_key
from kvbench.results.paired import FEWEST_UNITS, MARGIN, Verdict, verdict, verdicts
from kvbench.results.row import Row

MARGIN_TEXT = f"{MARGIN:g} nats"
HOW = (
    f"verdict: within margin where the 95% interval of the mean ΔNLL over windows ends below {MARGIN_TEXT}, worse "
    f"where it lies above 0 and reaches {MARGIN_TEXT}; none below {FEWEST_UNITS} windows"
)
"""The rule of the verdicts, for captions."""
BEST = (
    "bold ΔNLL: in each budget and decode mode the lowest and all that cannot be told apart from it (paired t tests "
    "over windows, corrected for skewness and by Holm for the number of pairs); none where no two methods differ"
)
NO_SAMPLES = "its windows are not in samples.jsonl, and an interval over 16-token blocks covers these windows only"


@dataclass(frozen=True)
class WindowEvidence:
    """What the windows show. windows, verdicts: by `window_key`; empty without samples.

    windows: of methods, over all texts of a run. single: of methods, on one text of a run over several. full: of the
    full cache. families: methods that were compared with each other. best: keys of the best methods of each family.
    """

    windows: Mapping[WindowKey, MethodWindows] = field(default_factory=dict)
    verdicts: Mapping[WindowKey, Verdict] = field(default_factory=dict)
    families: tuple[MethodFamily, ...] = ()
    best: frozenset[WindowKey] = frozenset()
    single: Mapping[WindowKey, MethodWindows] = field(default_factory=dict)
    full: Mapping[WindowKey, MethodWindows] = field(default_factory=dict)

    def verdict_of(self, row: Row | None) -> Verdict | None:
        """The verdict for the method, context and protocol of a row; None without samples."""
        found = (self.verdicts.get(key) for key in _keys(row)) if row is not None else iter(())
        return next((verdict for verdict in found if verdict is not None), None)

    def window_count(self, row: Row) -> int | None:
        """Windows of the method of a row, for the full cache of all methods beside it; None without samples."""
        own = self.windows_of(row)
        if own is not None or not is_baseline(row):
            return None if own is None else len(own.differences)
        setting = comparison_key(row, across_measures=True), row.context
        beside = [
            len(method.differences)
            for method in self.windows.values()
            if (comparison_key(method.row, across_measures=True), method.row.context) == setting
        ]
        return max(beside, default=None)

    def windows_of(self, row: Row | None) -> MethodWindows | None:
        """The windows behind a row of perplexity, of a method or of the full cache; None without samples."""
        for key in _keys(row) if row is not None else ():
            for known in (self.windows, self.single, self.full):
                if key in known:
                    return known[key]
        return None

    def verdict_on(self, row: Row, texts: Collection[str] = (), margin: float = MARGIN) -> Verdict | None:
        """The verdict for a row's method at a margin in nats; over the windows of some texts of its run together.

        texts: empty stands for all. None without such windows.
        """
        if not texts and margin == MARGIN:
            return self.verdict_of(row)
        differences = {name: each for method in self._parts(row, texts) for name, each in method.differences.items()}
        return verdict(list(differences.values()), margin) if differences else None

    def kl_on(self, row: Row, texts: Collection[str]) -> float | None:
        """Mean KL over the windows of some texts of a run; None where it was not recorded."""
        values = {name: each for method in self._parts(row, texts) for name, each in method.kl.items()}
        return sum(values.values()) / len(values) if values else None

    def _parts(self, row: Row, texts: Collection[str]) -> list[MethodWindows]:
        parts = [self.windows_of(replace(row, dataset=text)) for text in texts] if texts else [self.windows_of(row)]
        return [part for part in parts if part is not None]

    def is_best(self, row: Row) -> bool:
        """The method belongs to the best ones of its budget and decode mode."""
        return any(key in self.best for key in _keys(row))

    def best_text(self) -> list[str]:
        """For a caption: which methods are marked as best, or why none is. Empty without samples."""
        most = max((len(method.differences) for method in self.windows.values()), default=0)
        if not self.windows:
            return []
        if most < FEWEST_UNITS:
            return [f"no method is marked as best: {most} windows, {FEWEST_UNITS} needed to compare methods"]
        if not self.families:
            return [f"no method is marked as best: no 2 to {LARGEST} methods share budget, decode mode and windows"]
        return [BEST] if self.best else ["no method is marked as best: no two differ by paired tests over windows"]


NO_EVIDENCE = WindowEvidence()


def _keys(row: Row) -> tuple[WindowKey, WindowKey]:
    """Under which a row's samples may stand: samples of older runs name no protocol."""
    return window_key(row), window_key(replace(row, protocol=None))


def evidence_of(samples: Iterable[WindowSample]) -> WindowEvidence:
    """Gather the windows of each method, give its verdict, and compare the methods with each other."""
    known = list(samples)
    measured = [sample for sample in known if not is_baseline(sample.row)]
    windows, single = by_method(measured), by_text(measured)
    both = single | windows
    given = verdicts([list(method.differences.values()) for method in both.values()])
    families = families_of(windows)
    marked = ((family, place) for family in families if family.marks_best for place in family.best)
    best = frozenset(window_key(family.rows[place]) for family, place in marked)
    full = by_method(sample for sample in known if is_baseline(sample.row))
    return WindowEvidence(windows, dict(zip(both, given, strict=True)), tuple(families), best, single, full)


def verdict_cell(verdict: Verdict | None, *, short: bool = False) -> str:
    """The verdict as a cell of a table: `worse`, `not enough data (8 windows; at least 10 needed)`.

    short: two words at most.
    """
    if verdict is None:
        return "–"
    if verdict.kind == "worse":
        return "worse"
    if short:
        return verdict.kind.replace("_", " ").replace("not enough data", "no verdict")
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
