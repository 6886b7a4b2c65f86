"""The banner says what the evidence is, and warns of few windows and of mixed sources, machines and days."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbench.report.advice.banner import Banner, banner, mixed
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.results.row import Row
from tests.report.synthetic import FULL, OTHER, cache, windows_of

KNOWN: dict[str, Any] = {
    "source_hash": "a" * 64,
    "time_utc": "2026-11-30T10:00:00+00:00",
    "cpu": {"name": "AMD EPYC", "usable_cores": 2},
    "gpus": [{"name": "H200"}],
}


def banner_of(rows: list[Row], windows: int = 16, provenance: dict[str, Any] | None = None) -> Banner:
    evidence = evidence_of(windows_of(rows, windows))
    return banner(rows, groups_of(rows, evidence), evidence, {"one": KNOWN} if provenance is None else provenance)


def test_the_banner_names_model_numbers_windows_texts_machine_and_sources() -> None:
    made = banner_of([*FULL, *cache("full", 10, 0.001, **OTHER)])
    facts = dict(made.facts)
    assert facts["Model"] == "Toy-135M (3 KV heads, trained)" and facts["Numbers"].startswith("float32; ")
    assert facts["Windows"] == "16 a method, scored after 1,024 tokens" and facts["Texts"] == "essays"
    assert facts["Machine"] == "H200 and AMD EPYC, 2 cores"
    assert facts["Sources"] == "aaaaaaaaaa" and facts["Measured"] == "2026-11-30"
    assert made.warnings == []
    empty = dict(banner_of([], provenance={}).facts)
    assert empty["Windows"] == "no window in samples.jsonl" and empty["Sources"] == "not recorded"


def test_a_text_counts_once_however_it_was_pooled() -> None:
    rows = [replace(row, dataset="essays+code") for row in FULL] + FULL
    assert dict(banner_of(rows).facts)["Texts"] == "essays, code"


def test_few_windows_are_warned_of_with_the_number_needed() -> None:
    rows = [*FULL, *cache("full", 10, 0.001, **OTHER), *cache("h2o", 5, 0.004, reach=0.1, budget=64.0)]
    (told,) = banner_of(rows, windows=8).warnings
    assert told.startswith("8 windows for 2 of 2 settings: fewer than 10 windows, no verdict; 10 needed, up to ")
    assert banner_of(rows, windows=10).warnings == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"source_hash": "b" * 64}, "2 source versions of kvbench (aaaaaaaaaa, bbbbbbbbbb)"),
        ({"cpu": {"name": "Xeon", "usable_cores": 4}}, "2 machines"),
        ({"time_utc": "2026-12-01T10:00:00+00:00"}, "2 days (2026-11-30, 2026-12-01)"),
    ],
)
def test_mixed_sources_machines_or_days_behind_one_table_are_one_sentence_each(
    change: dict[str, Any], word: str
) -> None:
    rows = [replace(FULL[0], run="one"), replace(FULL[1], run="two"), replace(FULL[-1], run="two")]
    (told,) = mixed(rows, {"one": KNOWN, "two": KNOWN | change})
    assert word in told and "in one table (perplexity): a difference there may come from" in told
    assert mixed(rows, {"one": KNOWN, "two": KNOWN}) == [] and mixed(rows, {}) == []
    apart = [replace(FULL[0], run="one"), replace(FULL[-1], run="two")]  # no table holds both
    assert mixed(apart, {"one": KNOWN, "two": KNOWN | change}) == []
