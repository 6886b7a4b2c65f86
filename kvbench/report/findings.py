"""What a reader must know before believing a table: the warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.report import units
from kvbench.report.columns import heads_text, short_model
from kvbench.report.lines import baseline_of, lines_of
from kvbench.report.names import POOLED, RANDOM, Config, config_of, is_baseline, labels, layout_of, weights_of
from kvbench.report.needle import hits_of, uninformative
from kvbench.results.row import GRAPH, Row

# Methods that hold every token exactly, or none at all: engaged = 0 is their nature, not a fault.
EXACT = ("full", "recompute")
MOST_CELLS = 12  # named in one warning


@dataclass(frozen=True)
class Finding:
    """One warning: its kind (`did not engage`, `better than full`, ...) and the sentence."""

    kind: str
    text: str


def find_all(rows: Sequence[Row], runs: Mapping[str, Mapping[str, Any]] | None = None) -> list[Finding]:
    """Every warning that the rows, and the status of their run folders, give rise to.

    `runs` maps the name of a run folder to the content of its status.json.
    """
    names = labels(rows)
    found = [
        *_runs(runs or {}),
        *_together(_not_measured(rows), names),
        *_together(_not_engaged(rows), names),
        *_better_than_full(rows, names),
        *_uninformative(rows),
        *_together(_unsteady(rows), names),
        *_eager_beside_captured(rows, names),
        *_missing(rows, names),
        *_untrained(rows),
        *_notes(rows, names),
    ]
    return list(dict.fromkeys(found))


def _runs(runs: Mapping[str, Mapping[str, Any]]) -> Iterable[Finding]:
    for name, status in runs.items():
        state = str(status.get("status"))
        if state == "running":
            cells = status.get("cells_done", 0)
            yield Finding("still running", f"{name}: {cells} cells so far; more may follow")
        elif state != "ok":
            reason = status.get("error") or status.get("note") or "no reason recorded"
            yield Finding(f"run {state}", f"{name}: {_first_line(reason)}")
        open_cells = [cell for cell in status.get("cells") or [] if cell.get("status") in ("waiting", "interrupted")]
        if open_cells and state != "running":
            told = [f"{cell.get('method')} {cell.get('measure')} {cell.get('context') or ''}" for cell in open_cells]
            yield Finding("missing", f"{name}: not measured: {_listed([cell.strip() for cell in told])}")


Said = tuple[str, Row, str]  # kind, a row that it is said of, what is said


def _together(said: Iterable[Said], names: Mapping[Config, str]) -> Iterable[Finding]:
    """One warning for all methods of which the same is said at the same place."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for kind, row, text in said:
        of_place = places.setdefault((kind, row.measure, row.context, text), [])
        if (name := names[config_of(row)]) not in of_place:
            of_place.append(name)
    for (kind, measure, context, text), of_place in places.items():
        yield Finding(kind, f"{_listed(of_place)}, {_place(measure, context)}: {text}")


def _not_measured(rows: Iterable[Row]) -> Iterable[Said]:
    for row in rows:
        if row.status != "ok":
            yield row.status, row, _first_line(row.note or "no reason recorded")
        elif row.metric is not None and row.value is None and row.metric != "engaged":
            yield "not a number", row, f"{row.metric} came out undefined or infinite"


def _not_engaged(rows: Iterable[Row]) -> Iterable[Said]:
    for row in rows:
        if row.metric != "engaged" or row.status != "ok" or _exact(row):
            continue
        if row.value is None:
            yield "did not engage", row, "whether it engaged was not recorded"
        elif row.value == 0:
            yield "did not engage", row, "nothing was evicted or quantised, so these numbers are the full cache's"
        elif row.value < 0.5:
            share = units.percent(row.value)
            yield "hardly engaged", row, f"only {share} of the tokens followed a compression"


def _exact(row: Row) -> bool:
    return row.method in EXACT and row.store in (None, "dense", *EXACT)


def _better_than_full(rows: Sequence[Row], names: Mapping[Config, str]) -> Iterable[Finding]:
    doubt = "beyond the interval; look for a fault before believing it"
    for row in rows:
        if row.metric == "nll_minus_full" and row.high is not None and row.high < 0 and row.status == "ok":
            yield Finding("better than full", f"{_where(row, names)}: NLL below the full cache's, {doubt}")
        elif (row.note or "").startswith("better than full") and row.measure in ("tasks", "harness"):
            what = f"{row.protocol if row.measure == 'tasks' else row.dataset}"
            yield Finding("better than full", f"{_where(row, names)}: {what} scores above the full cache, {doubt}")
    lines = lines_of(rows, "needle", by_context=False)
    for line in lines:
        base = baseline_of(line, lines, by_context=False)
        for cell, row in line.cells.items():
            reference = base.cells.get(cell) if base is not None and base is not line else None
            bounds = None if reference is None else (row.low, reference.high)
            if row.metric == "hit_rate" and bounds and None not in bounds and bounds[0] > bounds[1]:  # type: ignore[operator]
                depth = "all depths" if row.depth is None else f"depth {row.depth:g}"
                where = f"{_where(row, names)}, {depth}"
                yield Finding("better than full", f"{where}: finds more needles than the full cache, {doubt}")


def _uninformative(rows: Sequence[Row]) -> Iterable[Finding]:
    lines = lines_of(rows, "needle", by_context=False)
    failing = uninformative(lines)
    for index, line in enumerate(lines):
        if not line.baseline:
            if baseline_of(line, lines, by_context=False) is None:
                text = "needle was measured without the full cache: a miss may be the model's own"
                yield Finding("no baseline", text)
            continue
        cells, task = hits_of(line), f" {line.row.protocol}" if line.row.protocol not in (None, "single_number") else ""
        for context, depth in sorted(failing[index], key=str):
            place = f"needle{task} at length {context}, " + ("all depths" if depth is None else f"depth {depth:g}")
            text = f"the full cache itself finds {cells[context, depth]}, which says little about compression"
            yield Finding("uninformative", f"{place}: {text}")
    for row in rows:
        if row.measure in ("tasks", "harness") and is_baseline(row) and (row.note or "").startswith("uninformative"):
            name = row.protocol if row.measure == "tasks" else row.dataset
            yield Finding("uninformative", f"{name}: the full cache itself scores 0, which says nothing of compression")


def _unsteady(rows: Sequence[Row]) -> Iterable[Said]:
    several = len({(row.model, row.kv_heads) for row in rows if row.method}) > 1
    for row in rows:
        if row.metric == "steady" and row.value == 0 and row.status == "ok":
            said = [part for part in (row.note or "").split("; ") if part.startswith("unsteady")]
            why = said[0] if said else row.note or "step times drifted or jumped while it was measured"
            whose = f"{short_model(row.model)} with {heads_text(row.kv_heads)}, " if several else ""
            yield "unsteady timing", row, whose + _first_line(why).removeprefix("unsteady: ")


def _eager_beside_captured(rows: Iterable[Row], names: Mapping[Config, str]) -> Iterable[Finding]:
    """Steps that launched their kernels one by one, where others of the same setting were replays of a graph."""
    eager: dict[tuple[Any, ...], set[str]] = {}
    captured: set[tuple[Any, ...]] = set()
    for row in rows:
        if row.measure != "latency" or row.status != "ok" or row.kernel is None or row.method == "recompute":
            continue  # a whole prefix a step is compared with nothing
        setting = (row.model, row.kv_heads, layout_of(row), row.dtype, row.device)
        if row.kernel.endswith(GRAPH):
            captured.add(setting)
        else:
            eager.setdefault(setting, set()).add(names[config_of(row)])
    for setting, methods in eager.items():
        if setting in captured:
            yield Finding(
                "eager beside captured",
                f"{_listed(sorted(methods))}: steps launched kernel by kernel, in a "
                "table with replays of a CUDA graph; what launching costs is in these times alone. Type "
                "latency.graph=false to time all alike",
            )


def _missing(rows: Sequence[Row], names: Mapping[Config, str]) -> Iterable[Finding]:
    """Methods that have numbers, but not where the baseline of their setting was measured."""
    there: dict[tuple[Any, ...], set[Config]] = {}
    everyone: dict[tuple[Any, ...], set[Config]] = {}
    based: set[tuple[Any, ...]] = set()
    for row in rows:
        if row.method is None or row.measure is None:
            continue
        setting = (row.model, row.kv_heads, layout_of(row), row.dtype, row.device)
        if row.status == "ok":
            everyone.setdefault(setting, set()).add(config_of(row))
        if row.context is not None:
            there.setdefault((*setting, row.measure, row.context), set()).add(config_of(row))
            if is_baseline(row) and row.status == "ok":
                based.add((*setting, row.measure, row.context))
    for place, configs in there.items():
        absent = [names[config] for config in everyone.get(place[:-2], set()) - configs]
        if place in based and absent:
            yield Finding("missing", f"{place[-2]} at context {place[-1]:,}: not measured: {_listed(sorted(absent))}")


def _untrained(rows: Iterable[Row]) -> Iterable[Finding]:
    """Heads that were repeated give the same logits; heads that were pooled do not, and random weights say nothing."""
    for model, heads, weights in dict.fromkeys((row.model, row.kv_heads, weights_of(row)) for row in rows):
        if weights == POOLED:
            yield Finding(
                "not lossless",
                f"{model} was converted to {heads_text(heads)}: its bytes and times stand "
                "for such a model, its quality does not",
            )
        elif weights == RANDOM:
            told = f"{model}: its bytes and times stand for a model of its shape, its quality for nothing"
            yield Finding("random weights", told)


def _notes(rows: Iterable[Row], names: Mapping[Config, str]) -> Iterable[Finding]:
    """Each note once, with everything it stands beside.

    A note that the baseline carries as well tells how something was measured: `remarks`, not a warning.
    """
    for note, carriers in _by_note(rows).items():
        if not any(is_baseline(row) for row in carriers):
            places = dict.fromkeys(f"{names[config_of(row)]} ({row.measure})" for row in carriers)
            yield Finding("note", f"{', '.join(places)}: {note}")


def remarks(rows: Iterable[Row]) -> list[Finding]:
    """How the numbers were measured, as their notes say: which metrics, and the note."""
    found = []
    for note, carriers in _by_note(rows).items():
        if any(is_baseline(row) for row in carriers):
            metrics = dict.fromkeys(row.metric for row in carriers if row.metric is not None)
            shown = ", ".join(list(metrics)[:4]) + (", ..." if len(metrics) > 4 else "")
            found.append(Finding(str(carriers[0].measure), f"{shown}: {note}"))
    return found


def _by_note(rows: Iterable[Row]) -> dict[str, list[Row]]:
    carriers: dict[str, list[Row]] = {}
    for row in rows:
        # A note holds one or several remarks; each is told once, whatever it is joined with.
        for note in _first_line(row.note).split("; ") if row.note and row.status == "ok" else ():
            # These are found from the numbers, and said once.
            if not note.startswith(("uninformative", "better than full")):
                carriers.setdefault(note, []).append(row)
    return carriers


def _where(row: Row, names: Mapping[Config, str]) -> str:
    return f"{names[config_of(row)]}, {_place(row.measure, row.context)}"


def _place(measure: str | None, context: int | None) -> str:
    return (measure or "run") + ("" if context is None else f" at context {context:,}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_CELLS} more" if len(names) > MOST_CELLS else ""
    return ", ".join(names[:MOST_CELLS]) + more


def _first_line(text: Any) -> str:
    return " ".join(str(text).split())[:300]
