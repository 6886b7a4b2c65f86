"""Sentences of the summary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.advice.summary import summary
from kvbench.results.row import Row
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
    assert none.startswith("In NLL, of 3 methods none is shown within 0.01 nats of the full cache: 2 worse, ")
    assert "1 without a verdict (its windows show neither a loss nor that the loss stays below 0.01 nats)" in none


def test_the_summary_names_the_share_of_the_cache_that_methods_can_compress() -> None:
    share = [replace(row, metric="compressible_share", value=0.289) for row in FULL if row.measure == "memory"]
    assert ", 28.9% of it in layers that methods can compress" in summary(judged_groups([*FULL, *share]))[0]


def test_a_method_that_lost_only_needles_is_within_the_margin_and_counted_with_the_needles() -> None:
    (group,) = judged_groups([*FULL, *cache("h2o", 4, 0.002, hits=2, budget=100.0)])
    _, nll, within, needles = summary([group])
    assert nll == "In NLL, of one method 1 is shown within 0.01 nats of the full cache."
    assert within.startswith("Within 0.01 nats: h2o in 4.00 MiB (5.00x smaller than 16-bit), ΔNLL +0.00200, within the")
    assert needles.endswith("; every method finds fewer, 1 of 1 methods fewer beyond the intervals.")


def timed(method: list[Row], ms: float, run: str) -> list[Row]:
    found = [
        replace(row, run=of, measure="latency", metric="tpot_p50_ms", value=value, unit="ms", context=512)
        for row, value, of in ((FULL[0], 10.0, "one"), (method[0], ms, run))
    ]
    return [*FULL, *method, *found]


@pytest.mark.parametrize(("ms", "rank"), [(5.0, "timed beside it."), (15.0, ", so no method is faster than the full")])
def test_the_fastest_method_is_not_called_fast_where_the_full_cache_is_faster(ms: float, rank: str) -> None:
    method = cache("h2o", 4, 0.001, budget=100.0)
    (sentence,) = [line for line in summary(judged_groups(timed(method, ms, "one"))) if "output token" in line]
    assert f"h2o takes {ms / 10:.2f}x the full cache's" in sentence and rank in sentence
    assert not any("output token" in line for line in summary(judged_groups(timed(method, ms, "other"))))


def test_methods_that_see_the_future_are_in_no_count() -> None:
    (group,) = judged_groups([*FULL, *cache("hindsight", 2, 0.001, budget=100.0), *cache("h2o", 4, 0.2, budget=100.0)])
    text = " ".join(summary([group]))
    assert "of one method none is shown" in text and "Smallest cache: h2o" in text and "Within" not in text


def test_methods_within_the_margin_are_listed_by_size_with_their_windows() -> None:
    (group,) = judged_groups([*FULL, *cache("full", 20, 0.001, **ONE), *cache("full", 10, 0.0045, **OTHER)])
    _, counts, within, *_ = summary([group])
    assert counts == "In NLL, of 2 methods 2 are shown within 0.01 nats of the full cache."
    assert within.startswith(
        "Within 0.01 nats: full+int4 in 10.0 MiB (2.00x smaller than 16-bit), ΔNLL +0.00450, within"
    )
    assert "0.01 nats, with a loss" not in within and "(16 windows; 95% interval -0.0" in within
    assert within.index("full+int4") < within.index("; full+int8 in 20.0 MiB (1.00x smaller than 16-bit)")


def test_without_samples_the_interval_of_the_row_stands_without_a_verdict() -> None:
    (group,) = judged_groups([*FULL, *cache("h2o", 4, 0.2, budget=100.0)], windows=0)
    _, counts, smallest, *_ = summary([group])
    assert "none is shown within 0.01 nats of the full cache: 1 without a verdict (its windows are not in" in counts
    assert smallest.endswith("ΔNLL +0.2000 [+0.1950, +0.2050], no verdict without samples.")
