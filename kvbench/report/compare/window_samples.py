"""The scores of each window under every method, beside the full cache's, from samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbench.report.compare.comparison import MODEL_AND_DEVICE, comparison_key, config_of, is_baseline
from kvbench.report.compare.texts import texts_of
from kvbench.results.row import KNOBS, Row
from kvbench.results.run_files import read_metrics, sample_records

COLUMNS = tuple(name for name in KNOBS if name not in ("method", "store", "knobs"))
NO_KNOB = ("seed",)
"""Recorded among a sample's knobs, but a setting of the row."""


SCORES = ("nll", "kl", "kl_reverse", "top1", "top5")
"""Scores of a window that samples record: the metrics of the same names, before the mean over windows."""


@dataclass(frozen=True)
class WindowSample:
    """One window under one method. row: the method with its knobs, its data set all texts of the run.

    text: which of them the window is from, None in a run over one text. scores: those of SCORES that were recorded.
    """

    row: Row
    window: str  # hash of its tokens: the same for the same text in every run
    difference: float  # NLL above the full cache's, nats a token; 0 for the full cache itself
    text: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


WindowKey = tuple[Any, ...]
"""Model and device, method with its knobs, context, protocol and data set."""


@dataclass(frozen=True)
class MethodWindows:
    """The windows of one method. row: the method with its knobs.

    differences: by window, NLL minus the full cache's, nats a token. scores: of each of SCORES, by window.
    """

    row: Row
    differences: dict[str, float] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=lambda: {name: {} for name in SCORES})

    @property
    def nll(self) -> dict[str, float]:
        """Nats a token, by window."""
        return self.scores["nll"]

    @property
    def kl(self) -> dict[str, float]:
        """From the full cache, nats a token, by window."""
        return self.scores["kl"]

    def add(self, sample: WindowSample) -> None:
        """Take one more window."""
        self.differences[sample.window] = sample.difference
        for name, value in sample.scores.items():
            self.scores[name][sample.window] = value


def window_key(row: Row) -> WindowKey:
    """Equal for a row of perplexity and the samples of the same method, model, device, context, protocol and text."""
    return (*comparison_key(row, across_measures=True), *config_of(row), row.context, row.protocol, row.dataset)


def by_method(samples: Iterable[WindowSample]) -> dict[WindowKey, MethodWindows]:
    """The windows of each method."""
    found: dict[WindowKey, MethodWindows] = {}
    for sample in samples:
        found.setdefault(window_key(sample.row), MethodWindows(sample.row)).add(sample)
    return found


def by_text(samples: Iterable[WindowSample]) -> dict[WindowKey, MethodWindows]:
    """The windows of each method on each text, of runs over several texts."""
    single = (sample for sample in samples if sample.text is not None and sample.text != sample.row.dataset)
    return by_method(replace(sample, row=replace(sample.row, dataset=sample.text)) for sample in single)


def read_samples(runs: Iterable[Path]) -> list[WindowSample]:
    """Paired differences of all perplexity windows. Of a window measured twice the later one counts."""
    return [sample for sample in read_windows(runs) if not is_baseline(sample.row)]


def read_windows(runs: Iterable[Path]) -> list[WindowSample]:
    """As `read_samples`, the full cache's own windows among them."""
    found: dict[tuple[Any, ...], WindowSample] = {}
    for run in runs:
        records = sample_records(run)
        setting = _setting(run) if records else {}
        for record in records:
            for sample in _differences(record, setting):
                row = sample.row
                key = (comparison_key(row), config_of(row), row.context, row.protocol, sample.window)
                found[key] = sample
    return list(found.values())


def _setting(run: Path) -> dict[str, Any]:
    """Model, device and data set of a run, which samples do not repeat."""
    metrics = read_metrics(run)
    rows = [] if metrics is None else metrics.select([*MODEL_AND_DEVICE, "measure", "dataset"]).to_pylist()
    if not rows:
        return {}
    datasets = [row["dataset"] for row in rows if row["measure"] == "perplexity"] or [rows[0]["dataset"]]
    pooled = max(datasets, key=lambda dataset: len(texts_of(dataset)))
    return {name: rows[0][name] for name in MODEL_AND_DEVICE} | {"dataset": pooled}


def _differences(record: Mapping[str, Any], setting: Mapping[str, Any]) -> list[WindowSample]:
    if record.get("measure") != "perplexity" or not isinstance(record.get("context"), int | None):
        return []
    if not isinstance(record.get("protocol"), str | None):
        return []
    scored = [
        (row_of(entry, record, setting), _scores(entry)) for entry in entries_of(record) if _finite(entry.get("nll"))
    ]
    base = next((scores["nll"] for row, scores in scored if is_baseline(row)), None)
    if base is None:
        return []
    window, text = str(record.get("sha256")), record.get("text")
    named = text if isinstance(text, str) else None
    return [WindowSample(row, window, scores["nll"] - base, named, scores) for row, scores in scored]


def _scores(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(entry[name]) for name in SCORES if _finite(entry.get(name))}


def entries_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a sample records of each method; entries of another kind are left out."""
    methods = record.get("methods")
    return [entry for entry in methods if _is_entry(entry)] if isinstance(methods, list) else []


def _is_entry(entry: Any) -> bool:
    """Whether an entry of a sample names a method, a store and plain knobs."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("method"), str):
        return False
    knobs = entry.get("knobs")
    plain = isinstance(knobs, Mapping | None) and not any(isinstance(v, list | dict) for v in (knobs or {}).values())
    return plain and isinstance(entry.get("store"), str | None)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def row_of(entry: Mapping[str, Any], record: Mapping[str, Any], setting: Mapping[str, Any]) -> Row:
    """The method of an entry with its knobs, context and protocol. setting: columns that samples do not repeat."""
    recorded = entry.get("knobs")
    known = recorded.items() if isinstance(recorded, Mapping) else ()
    knobs: dict[str, Any] = {name: value for name, value in known if value is not None}  # as rows record them
    columns = {name: knobs.pop(name) for name in COLUMNS if name in knobs}
    rest: Sequence[str] = sorted(name for name in knobs if name not in NO_KNOB)
    budget = columns.get("budget")
    columns["budget"] = float(budget) if isinstance(budget, int | float) else None
    columns["knobs"] = json.dumps({name: knobs[name] for name in rest}) if rest else None
    return Row(
        method=entry.get("method"),
        store=entry.get("store"),
        context=record.get("context"),
        protocol=record.get("protocol"),
        **setting,
        **columns,
    )
