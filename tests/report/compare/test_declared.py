"""Traits and measures are read from the yaml files of kvbench."""

from __future__ import annotations

from dataclasses import replace

from kvbench.measures.perplexity import Perplexity
from kvbench.report.compare.declared import (
    measured_bounded,
    shipped_headlines,
    shipped_measures,
    shipped_settings,
    traits_of,
)
from kvbench.results.row import Row


def test_traits_come_from_the_yaml_files_and_are_none_without_one() -> None:
    assert traits_of(Row(method="h2o", store="int4")).shrinks == "tokens, bits"
    assert traits_of(Row(method="h2o", knobs='{"decode": "append"}')).bounded is False
    assert traits_of(Row(method="of_mine", store="../../secret")).shrinks is None


def test_a_rule_that_evicts_in_blocks_may_hold_more_than_its_budget() -> None:
    kept = Row(metric="kept_tokens", value=300, context=1024)
    for method, bounded in (("h2o", False), ("r_kv", None)):
        assert measured_bounded(Row(method=method, budget=256), kept) is bounded
    kept = replace(kept, value=256)
    assert measured_bounded(Row(method="r_kv", budget=256), kept) is True
    assert traits_of(Row(method="r_kv")).bounded is True and traits_of(Row(method="lagkv")).bounded is False
    assert traits_of(Row(method="lagkv", knobs='{"decode": "evict"}')).bounded is True


def test_measures_are_listed_with_those_that_run_by_default_first() -> None:
    assert shipped_measures()[:4] == ("perplexity", "needle", "memory", "latency")
    assert {"tasks", "fidelity", "paging"} <= set(shipped_measures())
    assert "contexts" in shipped_settings("latency") and shipped_settings("of_mine") == {}


def test_headlines_are_those_of_the_measures_class() -> None:
    assert shipped_headlines("perplexity") == Perplexity.headlines and shipped_headlines("of_mine") == ()
