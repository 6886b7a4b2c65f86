"""Traits are read from the yaml files of methods and stores."""

from __future__ import annotations

from kvbench.report.compare.traits import traits_of
from kvbench.results.row import Row


def test_traits_come_from_the_config_and_are_unknown_for_what_is_not_there() -> None:
    assert traits_of(Row(method="h2o", store="int4")).shrinks == "tokens, bits"
    assert traits_of(Row(method="h2o", knobs='{"decode": "append"}')).bounded is False
    assert traits_of(Row(method="of_mine", store="../../secret")).shrinks is None
