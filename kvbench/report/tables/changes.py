"""Changes between two sweeps: `python -m kvbench.report --against OLD NEW`.

Numbers of perplexity are compared by paired tests over the windows that both sweeps scored, corrected by Holm for the
count of numbers. Below 10 such windows there is no verdict, because the intervals in rows then cover blocks of tokens.
Times get none either: an interval over the steps of one process says nothing about another process. Other numbers
differ if their intervals do not overlap; their units are prompts or documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvbench.report.compare.comparison import COMPARED, config_of
from kvbench.report.compare.names import labels, short_model
from kvbench.report.compare.number_text import interval, significant
from kvbench.report.compare.window_samples import SCORES
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence
from kvbench.report.tables.headlines import Recorded, better_of
from kvbench.report.tables.table import Column, Table, text_column
from kvbench.results.method_pairs import holm, pair_p_values
from kvbench.results.paired import FEWEST_UNITS, LEVEL, MARGIN
from kvbench.results.row import KNOBS, ROLES, Row

KEY = (*COMPARED, "protocol", "context", *KNOBS, *ROLES["place"])
"""Rows of two sweeps that agree in these columns are the same number measured twice."""
WINDOW_METRICS = {"ppl": "nll"} | {name: name for name in SCORES}
"""For each metric of perplexity the score of a window that it is the mean of; nll_minus_full is another."""
LEAST = 1e-4
"""Nats, or share: the smallest change that counts. Rounding alone moves a mean by less."""
COUNTED = ("bytes", "tokens", "positions", "bits", "x")
"""Units of numbers that are counted, so that any difference is a change."""
NOTABLE = 0.05
"""Relative change from which a number without a verdict is listed; for numbers in nats the change is MARGIN."""
Kind = Literal["worse", "better", "moved", "no verdict", "status", "gone", "new"]
ORDER: tuple[Kind, ...] = ("status", "worse", "better", "moved", "gone", "new", "no verdict")
Windows = tuple[WindowEvidence, WindowEvidence]
"""What the windows of the old and of the new sweep show."""


@dataclass(frozen=True)
class Change:
    """One number in both sweeps, or in one of them."""

    kind: Kind
    old: Row | None
    new: Row | None

    @property
    def row(self) -> Row:
        found = self.new or self.old
        if found is None:
            raise ValueError("a change needs a row")
        return found


def changes(
    old: Sequence[Row],
    new: Sequence[Row],
    recorded: Recorded | None = None,
    windows: Windows = (NO_EVIDENCE, NO_EVIDENCE),
) -> tuple[list[Change], int]:
    """Numbers that differ, are new, gone or have another status; and how many are unchanged.

    recorded: headlines from the configs of the run folders, which say whether low or high is better.
    """
    better = better_of(recorded)
    before, after = _by_key(old), _by_key(new)
    both = [(before[key], after[key]) for key in before if key in after]
    judged = _by_windows(both, windows)
    found: list[Change] = []
    same = 0
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            found.append(Change("new" if one is None else "gone", one, other))
        elif (kind := _kind(one, other, better, judged.get(id(other)))) is not None:
            found.append(Change(kind, one, other))
        else:
            same += 1
    found = _once_a_measure(found)
    return sorted(found, key=lambda change: ORDER.index(change.kind)), same


def _by_windows(pairs: Sequence[tuple[Row, Row]], windows: Windows) -> dict[int, bool]:
    """For rows of perplexity, by the id of the new one: whether they differ over 10 shared windows or more."""
    differences: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for old, new in pairs:
        scores = [_scores(row, evidence) for row, evidence in zip((old, new), windows, strict=True)]
        shared = sorted(scores[0].keys() & scores[1].keys())
        if len(shared) >= FEWEST_UNITS:
            differences[id(new)] = np.array([[each[window] for window in shared] for each in scores])
    p = holm(np.array([float(pair_p_values(each)[0]) for each in differences.values()]))
    return {
        key: bool(value < 1 - LEVEL and abs(float((each[1] - each[0]).mean())) > LEAST)
        for (key, each), value in zip(differences.items(), p, strict=True)
    }


def _scores(row: Row, evidence: WindowEvidence) -> Mapping[str, float]:
    """By window the score that the row is the mean of; empty where samples.jsonl does not record it."""
    found = evidence.windows_of(row) if row.measure == "perplexity" and row.position is None else None
    if found is None:
        return {}
    if row.metric == "nll_minus_full":
        return found.differences
    return found.scores.get(WINDOW_METRICS.get(str(row.metric), ""), {})


def _by_key(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """The latest row of each number; a failure never replaces a number."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.method is None:
            continue
        key = tuple(getattr(row, name) for name in KEY)
        if row.status == "ok" or key not in found:
            found[key] = row
    return found


def _kind(old: Row, new: Row, better_of_metric: Mapping[str, str], judged: bool | None) -> Kind | None:
    """judged: whether the two differ by their windows; None where that is not known."""
    if old.status != new.status:
        return "status"
    if old.value is None or new.value is None or old.value == new.value:
        return None if old.value == new.value else "status"
    bounds = (old.low, old.high, new.low, new.high)
    if old.unit in COUNTED:
        apart = not math.isclose(old.value, new.value, rel_tol=1e-9)
    elif judged is not None:
        apart = judged
    elif old.measure in ("perplexity", "latency") or None in bounds:
        return "no verdict" if _notable(old, new) else None
    else:
        apart = new.low > old.high or new.high < old.low  # type: ignore[operator]
    if not apart:
        return None
    better = better_of_metric.get(str(old.metric))
    if better is None:
        return "moved"
    return "better" if (new.value < old.value) == (better == "low") else "worse"


def _notable(old: Row, new: Row) -> bool:
    change = abs((new.value or 0.0) - (old.value or 0.0))
    return change > (MARGIN if old.unit == "nats" else NOTABLE * max(abs(old.value or 0.0), 1e-12))


def _once_a_measure(found: list[Change]) -> list[Change]:
    """A method that is new or gone gets one change for each measure and context, not one for each metric."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for change in found:
        if change.kind in ("new", "gone"):
            row = change.row
            place = (change.kind, row.model, row.dtype, config_of(row), row.measure, row.context)
            if place in seen:
                continue
            seen.add(place)
        kept.append(change)
    return kept


def changes_table(found: Sequence[Change], rows: Sequence[Row]) -> Table:
    """One line for each change, the most serious first."""
    names = labels([row for row in rows if row.method])
    models = {row.model for row in rows if row.method}
    texts = [_texts(change, names[config_of(change.row)]) for change in found]
    columns = [text_column(key, key, [text[key] for text in texts]) for key in ("what", "method", "measure", "metric")]
    if len(models) > 1:
        columns.insert(1, text_column("model", "model", [short_model(change.row.model, models) for change in found]))
    for key, side in (("old", "old"), ("new", "new")):
        cells = [text[key] for text in texts]
        rows_of_side = [getattr(change, side) for change in found]
        numbers = [None if row is None else row.value for row in rows_of_side]
        columns.append(Column(key, key, cells, cells, numbers=numbers))
    records = [_record(change, text) for change, text in zip(found, texts, strict=True)]
    return Table("against", "Changes", [], tuple(columns), records)


def _record(change: Change, text: Mapping[str, str]) -> dict[str, Any]:
    """The line of the CSV: where the change is, and both numbers unrounded with their bounds and statuses."""
    row = change.row
    record: dict[str, Any] = {"what": change.kind, "model": row.model, "method": text["method"]}
    record |= {"measure": row.measure, "context": row.context, "depth": row.depth, "metric": row.metric}
    for side, found in (("old", change.old), ("new", change.new)):
        columns = {"": "value", "_low": "low", "_high": "high", "_status": "status"}
        record |= {f"{side}{ending}": getattr(found, name, None) for ending, name in columns.items()}
    return record


def _texts(change: Change, label: str) -> dict[str, str]:
    row = change.row
    place = "" if row.context is None else f" at {row.context:,}"
    place += "" if row.depth is None else f", depth {row.depth:g}"
    metric = "–" if change.kind in ("new", "gone") else str(row.metric or "–")
    texts = {"what": change.kind, "method": label, "measure": f"{row.measure or 'run'}{place}", "metric": metric}
    whole = change.kind in ("new", "gone")
    return texts | {"old": _value(change.old, whole), "new": _value(change.new, whole)}


def _value(row: Row | None, whole: bool) -> str:
    if row is None:
        return "–"
    if whole:
        return "measured" if row.status == "ok" else row.status
    if row.value is None:
        return "not finite" if row.status == "ok" else row.status
    text = significant(row.value, 4)
    if row.low is None or row.high is None:
        return text
    return interval(text, significant(row.low, 4), significant(row.high, 4))


def changes_sentence(found: Sequence[Change], same: int) -> str:
    """`3 worse, 1 better, 120 numbers unchanged as far as the data show.`"""
    counts = Counter(change.kind for change in found)
    words = {"no verdict": "changed without enough data for a verdict", "status": "with another status"}
    parts = [f"{counts[kind]} {words.get(kind, kind)}" for kind in ORDER if counts[kind]]
    return ", ".join([*parts, f"{same:,} numbers unchanged as far as the data show"]) + "."
