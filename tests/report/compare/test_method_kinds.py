"""To which family a method belongs, and which settings a line may join."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbench.report.compare.method_kinds import family_of, series_of
from tests.shared.rows import BASE


@pytest.mark.parametrize(
    ("knobs", "family"),
    [
        ({"method": "full", "store": "dense"}, "reference"),
        ({"method": "full", "store": None}, "reference"),
        ({"method": "recompute"}, "reference"),
        ({"method": "random", "store": "dense", "budget": 256.0}, "reference"),
        ({"method": "random_unprotected", "store": "dense", "budget": 256.0}, "reference"),
        ({"method": "hindsight", "store": "dense", "budget": 256.0}, "reference"),
        ({"method": "mine", "store": "dense", "budget": 256.0, "flags": "sees_future"}, "reference"),
        ({"method": "full", "store": "int4", "bits": 4}, "quantised"),
        ({"method": "full", "store": "fp8"}, "quantised"),
        ({"method": "kivi4", "store": "kivi4", "bits": 4}, "quantised"),
        ({"method": "kivi", "store": "kivi4", "bits": 4}, "quantised"),
        ({"method": "mine", "store": "packed", "bits": 3}, "quantised"),
        ({"method": "h2o", "store": "dense", "budget": 256.0}, "score"),
        ({"method": "mine", "store": "dense", "budget": 256.0}, "score"),
        ({"method": "lagkv", "store": "paged", "budget": 256.0}, "score"),
        ({"method": "streaming_llm", "store": "dense", "budget": 256.0}, "position"),
        ({"method": "h2o", "store": "int4", "budget": 256.0, "bits": 4}, "mixed"),
        ({"method": "random", "store": "int4", "budget": 256.0, "bits": 4}, "mixed"),
        ({"method": "full", "store": "lowrank"}, "other"),
        ({"method": "full", "store": "lowrank", "bits": 8}, "other"),
        ({"method": "hf_quanto4", "store": "hf_quanto4", "bits": 4}, "other"),
    ],
)
def test_family_of_a_method(knobs: dict[str, Any], family: str) -> None:
    assert family_of(replace(BASE, **knobs)) == family


def test_only_budgets_share_a_series() -> None:
    row = replace(BASE, method="h2o", store="dense", budget=256.0, knobs='{"decode": "evict"}')
    assert series_of(row) == series_of(replace(row, budget=128.0))
    for change in ({"variant": "max"}, {"knobs": '{"decode": "append"}'}, {"store": "int4"}, {"bits": 4}):
        assert series_of(row) != series_of(replace(row, **change))
