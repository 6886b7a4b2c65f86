"""Traits and measures are read from the yaml files of kvbench."""

from __future__ import annotations

from kvbench.measures.perplexity import Perplexity
from kvbench.report.compare.declared import shipped_headlines, shipped_measures, shipped_settings, traits_of
from kvbench.results.row import Row


def test_traits_come_from_the_yaml_files_and_are_none_without_one() -> None:
    assert traits_of(Row(method="h2o", store="int4")).shrinks == "tokens, bits"
    assert traits_of(Row(method="h2o", knobs='{"decode": "append"}')).bounded is False
    assert traits_of(Row(method="of_mine", store="../../secret")).shrinks is None


def test_measures_are_listed_with_those_that_run_by_default_first() -> None:
    assert shipped_measures()[:4] == ("perplexity", "needle", "memory", "latency")
    assert {"tasks", "fidelity", "paging"} <= set(shipped_measures())
    assert "contexts" in shipped_settings("latency") and shipped_settings("of_mine") == {}


def test_headlines_are_those_of_the_measures_class() -> None:
    assert shipped_headlines("perplexity") == Perplexity.headlines and shipped_headlines("of_mine") == ()
