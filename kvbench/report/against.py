"""What moved between two sweeps beyond the intervals: `python -m kvbench.report --against OLD NEW`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.files import write_atomic
from kvbench.report import overview, tables
from kvbench.report.columns import short_model
from kvbench.report.names import config_of, labels
from kvbench.report.table import Column, Table, text_column, to_csv, to_latex, to_markdown
from kvbench.report.units import interval, significant
from kvbench.results.loading import load
from kvbench.results.row import KNOBS, Row, rows_of

KEY = (
    "model",
    "kv_heads",
    "converted",
    *KNOBS,
    "measure",
    "metric",
    "protocol",
    "question",
    "dataset",
    "context",
    "depth",
    "batch",
    "dtype",
    "device",
    "position",
)
COUNTED = ("bytes", "tokens", "positions", "bits", "x")  # units of what is counted, not sampled
MOST_LINES = 40
NOTABLE = 0.05  # relative change of a number without an interval that is worth a line of its own
Kind = Literal["worse", "better", "moved", "no interval", "status", "gone", "new"]
ORDER: tuple[Kind, ...] = ("status", "worse", "better", "moved", "gone", "new", "no interval")


@dataclass(frozen=True)
class Move:
    """One number in both sweeps, or in one of them."""

    kind: Kind
    old: Row | None
    new: Row | None

    @property
    def row(self) -> Row:
        found = self.new or self.old
        if found is None:
            raise ValueError("a move needs a row")
        return found


def write_against(old: Path, new: Path, out: Path) -> tuple[Table | None, str]:
    """Write against.html, .md, .csv and .tex into `out`; returns what a terminal shows and a sentence on it all.

    The terminal gets what the intervals can judge, MOST_LINES at most; the files get everything.

    Raises UserError where one of the two holds no rows.
    """
    from kvbench.report.html import against_html

    before, after = rows_of(load(old)), rows_of(load(new))
    found, same = moves(before, after)
    table = against_table(found, [*before, *after])
    sentence = told(found, same)
    out.mkdir(parents=True, exist_ok=True)
    title = f"{old.name} against {new.name}"
    write_atomic(out / "against.csv", to_csv(table))
    write_atomic(out / "against.tex", to_latex(table))
    write_atomic(out / "against.md", f"# {title}\n\n{sentence}\n\n{to_markdown(table) if found else ''}")
    write_atomic(out / "against.html", against_html(table if found else None, title, sentence))
    judged = [move for move in found if move.kind != "no interval"][:MOST_LINES]
    return against_table(judged, [*before, *after]) if judged else None, sentence


def moves(old: Sequence[Row], new: Sequence[Row]) -> tuple[list[Move], int]:
    """What moved beyond the intervals, came, went or changed its status; and how many numbers did not."""
    before, after = _by_key(old), _by_key(new)
    found: list[Move] = []
    same = 0
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            found.append(Move("new" if one is None else "gone", one, other))
        elif (kind := _kind(one, other)) is not None:
            found.append(Move(kind, one, other))
        else:
            same += 1
    found = _without_shadows(found)
    return sorted(found, key=lambda move: ORDER.index(move.kind)), same


def _by_key(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """The latest row of each cell; of a failure and a number the number."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.method is None:
            continue
        key = tuple(getattr(row, name) for name in KEY)
        if row.status == "ok" or key not in found:
            found[key] = row
    return found


def _kind(old: Row, new: Row) -> Kind | None:
    if old.status != new.status:
        return "status"
    if old.value is None or new.value is None or old.value == new.value:
        return None if old.value == new.value else "status"
    counted = old.unit in COUNTED
    bounds = (old.low, old.high, new.low, new.high)
    if not counted and None in bounds:
        change = abs(new.value - old.value) / max(abs(old.value), 1e-12)
        return "no interval" if change > NOTABLE else None
    if counted:
        apart = not math.isclose(old.value, new.value, rel_tol=1e-9)
    else:
        apart = new.low > old.high or new.high < old.low  # type: ignore[operator]
    if not apart:
        return None
    better = BETTER.get(str(old.metric))
    if better is None:
        return "moved"
    return "better" if (new.value < old.value) == (better == "low") else "worse"


def _without_shadows(found: list[Move]) -> list[Move]:
    """A whole method that came or went is one line a measure, not one a metric."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for move in found:
        if move.kind in ("new", "gone"):
            row = move.row
            place = (move.kind, row.model, row.dtype, config_of(row), row.measure, row.context)
            if place in seen:
                continue
            seen.add(place)
        kept.append(move)
    return kept


BETTER: dict[str, str] = {
    headline.metric: str(headline.better)
    for headlines in (*tables.HEADLINES.values(), overview.HEADLINES)
    for headline in headlines
    if headline.better is not None
} | {"nll": "low", "hits": "high", "hit_rate": "high"}


def against_table(found: Sequence[Move], rows: Sequence[Row]) -> Table:
    """One line a move, the most serious first."""
    names = labels([row for row in rows if row.method])
    models = {row.model for row in rows if row.method}
    texts = [_texts(move, names[config_of(move.row)]) for move in found]
    columns = [text_column(key, key, [text[key] for text in texts]) for key in ("what", "method", "measure", "metric")]
    if len(models) > 1:
        columns.insert(1, text_column("model", "model", [short_model(move.row.model, models) for move in found]))
    for key, side in (("old", "old"), ("new", "new")):
        cells = [text[key] for text in texts]
        rows_of_side = [getattr(move, side) for move in found]
        numbers = [None if row is None else row.value for row in rows_of_side]
        columns.append(Column(key, key, cells, cells, numbers=numbers))
    return Table("against", "What moved", [], tuple(columns), [dict(text) for text in texts])


def _texts(move: Move, label: str) -> dict[str, str]:
    row = move.row
    place = "" if row.context is None else f" at {row.context:,}"
    place += "" if row.depth is None else f", depth {row.depth:g}"
    metric = "–" if move.kind in ("new", "gone") else str(row.metric or "–")
    texts = {"what": move.kind, "method": label, "measure": f"{row.measure or 'run'}{place}", "metric": metric}
    whole = move.kind in ("new", "gone")
    return texts | {"old": _value(move.old, whole), "new": _value(move.new, whole)}


def _value(row: Row | None, whole: bool) -> str:
    if row is None:
        return "–"
    if whole:
        return "measured" if row.status == "ok" else row.status
    if row.value is None:
        return row.status
    text = significant(row.value, 4)
    if row.low is None or row.high is None:
        return text
    return interval(text, significant(row.low, 4), significant(row.high, 4))


def told(found: Sequence[Move], same: int) -> str:
    """`3 worse, 1 better, 120 numbers unchanged within their intervals.`"""
    counts = Counter(move.kind for move in found)
    words = {"no interval": "changed without an interval to judge by", "status": "with another status"}
    parts = [f"{counts[kind]} {words.get(kind, kind)}" for kind in ORDER if counts[kind]]
    return ", ".join([*parts, f"{same:,} numbers unchanged within their intervals"]) + "."
