"""Warnings: what a reader must know before trusting a table. Decided from numbers, flags and statuses, never notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import (
    Config,
    baseline_of,
    comparison_key,
    config_of,
    is_baseline,
    lines_of,
    weights_of,
)
from kvbench.report.compare.names import heads_text, labels, name_list, short_model
from kvbench.report.compare.needle_hits import hits_of, uninformative_places
from kvbench.report.compare.texts import split_by_text
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence
from kvbench.results.loading import Loaded
from kvbench.results.paired import FEWEST_UNITS
from kvbench.results.row import FLAGS, GRAPH, Row, flags_of, is_exact

MOST_NAMES = 12
"""Methods or cells that one warning names."""
SHOWN_FLAGS = {"not_finite": "not finite", "beyond_positions": "beyond positions"}
"""Flags that become a warning as they are, with its kind."""
WARNED_FLAGS = {*SHOWN_FLAGS, "better_than_full", "uninformative", "unsteady", "not_engaged"}
GAPS = ("gap_closed_kl", "gap_closed_nll")
"""Metrics whose value may be missing for the reason in their note."""
FAULT = "beyond the interval; look for a fault before believing it"


@dataclass(frozen=True)
class ReportWarning:
    """kind: `did not engage`, `better than full`, ...; text: the sentence."""

    kind: str
    text: str


def find_warnings(
    rows: Sequence[Row], runs: Mapping[str, Mapping[str, Any]] | None = None, evidence: WindowEvidence = NO_EVIDENCE
) -> list[ReportWarning]:
    """All warnings that follow from the rows and from the status of their run folders.

    runs: for each run folder's name the content of its status.json. evidence: windows that tell whether a method scores
    above the full cache; without them the interval of a row serves, if its units are windows.
    """
    names = labels(rows)
    found = [
        *_runs(runs or {}),
        *_merged(_not_measured(rows), names),
        *_merged(_not_engaged(rows), names),
        *_better_than_full(rows, names, evidence),
        *_uninformative(rows),
        *_merged(_unsteady(rows), names),
        *_merged(_flagged(rows), names),
        *_eager_beside_captured(rows, names),
        *_missing(rows, names),
        *_untrained(rows),
        *_notes(rows, names),
    ]
    return list(dict.fromkeys(found))


def lost_rows(loaded: Loaded) -> list[ReportWarning]:
    """One warning where fewer rows were found than the status.json files count."""
    if loaded.found == loaded.promised:
        return []
    folders = name_list([run.name for run in loaded.incomplete], MOST_NAMES)
    counted = f"{loaded.found:,} rows found of {loaded.promised:,} that the status.json files count"
    return [ReportWarning("rows lost", f"{counted}; metrics.parquet is lost or damaged in {folders}")]


def _runs(runs: Mapping[str, Mapping[str, Any]]) -> Iterable[ReportWarning]:
    for name, status in runs.items():
        state = str(status.get("status"))
        if state == "running":
            yield ReportWarning("still running", f"{name}: {status.get('cells_done', 0)} cells so far; more may follow")
        elif state != "ok":
            reason = status.get("error") or status.get("note") or "no reason recorded"
            yield ReportWarning(f"run {state}", f"{name}: {_one_line(reason)}")
        open_cells = [cell for cell in status.get("cells") or [] if cell.get("status") in ("waiting", "interrupted")]
        if open_cells and state != "running":
            cells = [f"{cell.get('method')} {cell.get('measure')} {cell.get('context') or ''}" for cell in open_cells]
            listed = name_list([cell.strip() for cell in cells], MOST_NAMES)
            yield ReportWarning("missing", f"{name}: not measured: {listed}")


AboutRow = tuple[str, Row, str]
"""Kind of a warning, the row that it is about, the text."""


def _merged(warnings: Iterable[AboutRow], names: Mapping[Config, str]) -> Iterable[ReportWarning]:
    """Identical warnings about several methods at one measure and context, merged into one."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for kind, row, text in warnings:
        methods = places.setdefault((kind, row.measure, row.context, text), [])
        if (name := names[config_of(row)]) not in methods:
            methods.append(name)
    for (kind, measure, context, text), methods in places.items():
        yield ReportWarning(kind, f"{name_list(methods, MOST_NAMES)}, {_place(measure, context)}: {text}")


def _not_measured(rows: Iterable[Row]) -> Iterable[AboutRow]:
    for row in rows:
        if row.status != "ok":
            yield row.status, row, _one_line(row.note or "no reason recorded")
        elif row.metric not in (None, "engaged", *GAPS) and row.value is None and "not_computed" not in flags_of(row):
            yield "not a number", row, f"{row.metric} is undefined or infinite"


def _not_engaged(rows: Iterable[Row]) -> Iterable[AboutRow]:
    for row in rows:
        if row.metric != "engaged" or row.status != "ok" or is_exact(row):
            continue
        if row.value is None:
            yield "did not engage", row, "whether it evicted or quantised anything was not recorded"
        elif row.value == 0:
            yield "did not engage", row, "nothing was evicted or quantised, so these numbers are the full cache's"
        elif row.value < 0.5:
            share = number_text.percent(row.value)
            yield "hardly engaged", row, f"only {share} of the scored tokens followed an eviction or a quantisation"


def _better_than_full(
    rows: Sequence[Row], names: Mapping[Config, str], evidence: WindowEvidence
) -> Iterable[ReportWarning]:
    kind = "better than full"
    flagged: set[tuple[Any, ...]] = set()
    for row in split_by_text(rows)[0]:
        if row.metric == "nll_minus_full" and row.status == "ok":
            if _below_full(row, evidence):
                yield ReportWarning(kind, f"{_where(row, names)}: NLL below the full cache's, {FAULT}")
        elif row.measure == "perplexity":
            continue  # judged by nll_minus_full
        elif "better_than_full" in flags_of(row) and row.measure == "needle":
            flagged.add((config_of(row), row.context, row.depth))
            yield ReportWarning(kind, _more_needles(row, names))
        elif "better_than_full" in flags_of(row):
            yield ReportWarning(kind, f"{_where(row, names)}: {_task(row)} scores above the full cache, {FAULT}")
    lines = lines_of(rows, "needle", by_context=False)
    for line in lines:
        base = baseline_of(line, lines, by_context=False)
        for cell, row in line.cells.items():
            reference = base.cells.get(cell) if base is not None and base is not line else None
            bounds = None if reference is None else (row.low, reference.high)
            if row.metric != "hit_rate" or bounds is None or None in bounds:
                continue
            beyond = bounds[0] > bounds[1]  # type: ignore[operator]
            if beyond and (config_of(row), row.context, row.depth) not in flagged:
                yield ReportWarning(kind, _more_needles(row, names))


def _below_full(row: Row, evidence: WindowEvidence) -> bool:
    """The NLL lies below the full cache's over 10 windows or more; an interval over blocks of tokens shows nothing."""
    verdict = evidence.verdict_of(row)
    if verdict is not None:
        return verdict.n >= FEWEST_UNITS and verdict.high < 0
    return row.high is not None and row.high < 0 and "few_windows" not in flags_of(row)


def _more_needles(row: Row, names: Mapping[Config, str]) -> str:
    depth = "all depths" if row.depth is None else f"depth {row.depth:g}"
    return f"{_where(row, names)}, {depth}: finds more needles than the full cache, {FAULT}"


def _task(row: Row) -> str:
    """What a row of several tasks is about: the task, the data set or the metric."""
    return str((row.dataset if row.measure == "harness" else row.protocol) or row.metric)


def _uninformative(rows: Sequence[Row]) -> Iterable[ReportWarning]:
    lines = lines_of(rows, "needle", by_context=False)
    failing = uninformative_places(lines)
    for index, line in enumerate(lines):
        if not line.baseline:
            if baseline_of(line, lines, by_context=False) is None:
                text = "needle was measured without the full cache: a miss may be the model's own"
                yield ReportWarning("no baseline", text)
            continue
        cells, task = hits_of(line), f" {line.row.protocol}" if line.row.protocol not in (None, "single_number") else ""
        for context, depth in sorted(failing[index], key=str):
            place = f"needle{task} at length {context}, " + ("all depths" if depth is None else f"depth {depth:g}")
            text = f"the full cache finds only {cells[context, depth]}: a miss may be the model's own"
            yield ReportWarning("uninformative", f"{place}: {text}")
    for row in rows:
        if row.measure != "needle" and is_baseline(row) and "uninformative" in flags_of(row):
            text = "the full cache itself scores 0, so a method's score says nothing about compression"
            yield ReportWarning("uninformative", f"{_task(row)}: {text}")


def _unsteady(rows: Sequence[Row]) -> Iterable[AboutRow]:
    several = len({(row.model, row.kv_heads) for row in rows if row.method}) > 1
    for row in rows:
        if row.metric == "steady" and row.status == "ok" and (row.value == 0 or "unsteady" in flags_of(row)):
            model = f"{short_model(row.model)} with {heads_text(row.kv_heads)}, " if several else ""
            yield "unsteady timing", row, model + FLAGS["unsteady"]


def _flagged(rows: Sequence[Row]) -> Iterable[AboutRow]:
    for row in rows:
        for name in flags_of(row) & SHOWN_FLAGS.keys() if row.value is not None else ():
            yield SHOWN_FLAGS[name], row, FLAGS[name]


def _eager_beside_captured(rows: Iterable[Row], names: Mapping[Config, str]) -> Iterable[ReportWarning]:
    """Methods whose steps launched every kernel, where other methods of the same setting replayed a CUDA graph."""
    eager: dict[tuple[Any, ...], set[str]] = {}
    captured: set[tuple[Any, ...]] = set()
    for row in rows:
        if row.measure != "latency" or row.status != "ok" or row.kernel is None or row.method == "recompute":
            continue  # recompute runs a whole prefill each step
        setting = comparison_key(row, across_measures=True)
        if row.kernel.endswith(GRAPH):
            captured.add(setting)
        else:
            eager.setdefault(setting, set()).add(names[config_of(row)])
    for setting, methods in eager.items():
        if setting in captured:
            yield ReportWarning(
                "eager beside captured",
                f"{name_list(sorted(methods), MOST_NAMES)}: these steps launch kernel by kernel, other methods replay "
                "a CUDA graph, so only these times contain launch overhead. Type latency.graph=false to time all alike",
            )


def _missing(rows: Sequence[Row], names: Mapping[Config, str]) -> Iterable[ReportWarning]:
    """Methods that have numbers, but none where the baseline of their setting was measured."""
    there: dict[tuple[Any, ...], set[Config]] = {}
    everyone: dict[tuple[Any, ...], set[Config]] = {}
    based: set[tuple[Any, ...]] = set()
    for row in rows:
        if row.method is None or row.measure is None:
            continue
        setting = comparison_key(row, across_measures=True)
        if row.status == "ok":
            everyone.setdefault(setting, set()).add(config_of(row))
        if row.context is not None:
            there.setdefault((*setting, row.measure, row.context), set()).add(config_of(row))
            if is_baseline(row) and row.status == "ok":
                based.add((*setting, row.measure, row.context))
    for place, configs in there.items():
        absent = [names[config] for config in everyone.get(place[:-2], set()) - configs]
        if place in based and absent:
            listed = name_list(sorted(absent), MOST_NAMES)
            yield ReportWarning("missing", f"{place[-2]} at context {place[-1]:,}: not measured: {listed}")


def _untrained(rows: Iterable[Row]) -> Iterable[ReportWarning]:
    """Models whose quality says nothing: heads mean-pooled without training, or random weights."""
    for model, heads, weights in dict.fromkeys((row.model, row.kv_heads, weights_of(row)) for row in rows):
        if weights == "pooled":
            text = "bytes and times are those of such a model, its quality is not"
            yield ReportWarning("not lossless", f"{model} was converted to {heads_text(heads)} by mean-pooling: {text}")
        elif weights == "random":
            text = "bytes and times are those of this architecture, quality numbers are meaningless"
            yield ReportWarning("random weights", f"{model}: {text}")


def _notes(rows: Iterable[Row], names: Mapping[Config, str]) -> Iterable[ReportWarning]:
    """Each note that only methods carry, once, with the methods and measures that carry it."""
    for note, carriers in _by_note(rows).items():
        if not _is_remark(carriers):
            places = dict.fromkeys(f"{names[config_of(row)]} ({row.measure})" for row in carriers)
            yield ReportWarning("note", f"{', '.join(places)}: {note}")


def remarks(rows: Iterable[Row]) -> list[ReportWarning]:
    """How the numbers were measured: each note that the baseline carries too, with the metrics that carry it."""
    found = []
    for note, carriers in _by_note(rows).items():
        if _is_remark(carriers):
            metrics = dict.fromkeys(row.metric for row in carriers if row.metric is not None)
            shown = ", ".join(list(metrics)[:4]) + (", ..." if len(metrics) > 4 else "")
            found.append(ReportWarning(str(carriers[0].measure), f"{shown}: {note}"))
    return found


def _is_remark(carriers: Sequence[Row]) -> bool:
    """True if the baseline carries the note as well, if flags of its rows give a warning, or if it explains a gap."""
    known = any(is_baseline(row) or flags_of(row) & WARNED_FLAGS for row in carriers)
    return known or all(row.metric in GAPS for row in carriers)


def _by_note(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows that carry each note. A note of several parts, joined by semicolons, counts as several notes."""
    carriers: dict[str, list[Row]] = {}
    for row in rows:
        if row.note and row.status == "ok":
            for part in _one_line(row.note).split("; "):
                carriers.setdefault(part, []).append(row)
    return carriers


def _where(row: Row, names: Mapping[Config, str]) -> str:
    return f"{names[config_of(row)]}, {_place(row.measure, row.context)}"


def _place(measure: str | None, context: int | None) -> str:
    return (measure or "run") + ("" if context is None else f" at context {context:,}")


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())[:300]
