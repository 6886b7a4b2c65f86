"""Sentences of the summary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.advice.summary import summary
from tests.report.synthetic import FULL, ONE, OTHER, cache, judged_groups


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("repeated", "heads repeated: the same logits from a larger cache than the model's own"),
        ("pooled", "heads mean-pooled without training"),
        ("random", "random weights"),
    ],
)
def test_the_summary_names_weights_that_were_not_trained(weights: str, reason: str) -> None:
    made = [replace(row, kv_heads=9, weights=weights) for row in [*FULL, *cache("h2o", 20, 0.001)]]
    assert any(f"1 without a verdict ({reason})" in line for line in summary(judged_groups(made)))


def test_the_summary_counts_settings_losses_and_methods_that_cannot_be_judged() -> None:
    lost = [cache("h2o", held, 0.2, budget=budget) for held, budget in ((4.0, 100.0), (8.0, 200.0))]
    (group,) = judged_groups([*FULL, *lost[0], *lost[1], *cache("full", 9, 0.01, reach=0.1, **OTHER)])
    scope, none, *_ = summary([group])
    assert scope.startswith("2 methods in 3 settings compared with the full cache, which has a perplexity of 20.00")
    assert none.startswith("Of 3 methods none is shown within 0.01 nats of the full cache: 2 worse in NLL, ")
    assert "1 without a verdict (its windows show neither a loss nor that the loss stays below 0.01 nats)" in none


def test_the_summary_names_the_share_of_the_cache_that_methods_can_compress() -> None:
    share = [replace(row, metric="compressible_share", value=0.289) for row in FULL if row.measure == "memory"]
    assert ", 28.9% of it in layers that methods can compress" in summary(judged_groups([*FULL, *share]))[0]


def test_a_method_that_lost_only_needles_is_counted_as_such() -> None:
    (group,) = judged_groups([*FULL, *cache("h2o", 4, 0.002, hits=2, budget=100.0)])
    _, none, smallest, *_ = summary([group])
    assert none.startswith("Of one method none is shown within 0.01 nats of the full cache: 1 with fewer needles")
    assert smallest.startswith("Smallest cache: h2o in 4.00 MiB (10.00x smaller), ΔNLL +0.00200, within the margin ")


@pytest.mark.parametrize(("ms", "rank"), [(5.0, "the fastest method."), (15.0, "which is not faster than the full")])
def test_the_fastest_method_is_not_called_fast_where_the_full_cache_is_faster(ms: float, rank: str) -> None:
    method = cache("h2o", 4, 0.001, budget=100.0)
    timed = [
        replace(row, measure="latency", metric="tpot_p50_ms", value=value, unit="ms", context=512)
        for row, value in ((FULL[0], 10.0), (method[0], ms))
    ]
    (sentence,) = [line for line in summary(judged_groups([*FULL, *method, *timed])) if "output token" in line]
    assert rank in sentence


def test_methods_within_the_margin_are_listed_by_size_with_their_windows() -> None:
    (group,) = judged_groups([*FULL, *cache("full", 20, 0.001, **ONE), *cache("full", 10, 0.0045, **OTHER)])
    _, counts, within, *_ = summary([group])
    assert counts == "Of 2 methods 2 are shown within 0.01 nats of the full cache."
    assert within.startswith("Within 0.01 nats: full+int4 in 10.0 MiB (4.00x smaller), ΔNLL +0.00450, within")
    assert "0.01 nats, with a loss" not in within and "(16 windows; 95% interval -0.0" in within
    assert within.index("full+int4") < within.index("; full+int8 in 20.0 MiB (2.00x smaller)")


def test_without_samples_the_interval_of_the_row_stands_without_a_verdict() -> None:
    (group,) = judged_groups([*FULL, *cache("h2o", 4, 0.2, budget=100.0)], windows=0)
    _, counts, smallest, *_ = summary([group])
    assert "none is shown within 0.01 nats of the full cache: 1 without a verdict (its windows are not in" in counts
    assert smallest.endswith("ΔNLL +0.2000 [+0.1950, +0.2050], no verdict without samples.")
