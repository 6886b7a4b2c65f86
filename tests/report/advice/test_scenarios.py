"""Advice follows the rows: swap the numbers and the advice swaps; a method that lost is never recommended."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.report.advice.scenarios import SCENARIOS, advise
from kvbench.results.row import Row
from tests.report.synthetic import FULL, ONE, OTHER, advice_on, cache, chosen, judged_groups


def test_the_smaller_cache_without_a_loss_is_chosen_and_swapping_the_numbers_swaps_it() -> None:
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 20, 0.001, **ONE)
    assert chosen(rows, "shrink") == "full+int4"
    assert advice_on(rows, "shrink").runner_up.label == "full+int8"  # type: ignore[union-attr]
    rows = FULL + cache("full", 20, 0.001, **OTHER) + cache("full", 10, 0.001, **ONE)
    assert chosen(rows, "shrink") == "full+int8"


def test_a_method_that_is_worse_is_never_recommended_and_is_the_price_of_a_smaller_cache() -> None:
    rows = FULL + cache("full", 10, 0.02, **OTHER) + cache("full", 20, 0.001, **ONE)
    advice = advice_on(rows, "shrink")
    assert advice.headline == "full+int8" and advice.runner_up is None
    assert any(reason.startswith("a smaller cache costs quality: full+int4") for reason in advice.reasons)
    rows = FULL + cache("full", 10, 0.02, **OTHER) + cache("full", 20, 0.01, **ONE)
    assert chosen(rows, "shrink") == "no method shown within 0.01 nats"


def test_caches_of_about_one_size_are_told_apart_by_quality() -> None:
    rows = FULL + cache("full", 10, 0.004, **OTHER) + cache("full", 10.5, 0.001, **ONE)
    assert chosen(rows, "shrink") == "full+int8"
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 10.5, 0.004, **ONE)
    assert chosen(rows, "shrink") == "full+int4"


def test_streaming_asks_for_a_cache_that_stops_growing() -> None:
    bounded = cache("h2o", 10, 0.001, budget=256.0) + cache("tova", 20, 0.001, budget=512.0)
    assert chosen([*FULL, *bounded, *cache("full", 5, 0.001, **OTHER)], "streaming") == "h2o"
    # What holds more than its budget after decoding has grown, whatever its name says.
    grew = [row.metric == "kept_tokens" and row.method == "h2o" for row in bounded]
    grown = [replace(row, value=384.0) if grows else row for row, grows in zip(bounded, grew, strict=True)]
    rows = [*FULL, *grown, *cache("streaming_llm", 30, 0.001, budget=768.0)]
    assert chosen(rows, "streaming") == "tova"


def test_retrieval_goes_by_needles_first() -> None:
    rows = FULL + cache("full", 10, 0.001, hits=10, **OTHER) + cache("full", 20, 0.001, hits=12, **ONE)
    assert chosen(rows, "retrieval") == "full+int8"
    rows = FULL + cache("full", 10, 0.001, hits=12, **OTHER) + cache("full", 20, 0.001, hits=10, **ONE)
    assert chosen(rows, "retrieval") == "full+int4"
    rows = FULL + cache("full", 10, 0.001, hits=3, **OTHER) + cache("full", 20, 0.001, hits=2, **ONE)
    advice = advice_on(rows, "retrieval")
    assert advice.choice is None and any("3/12 needles at 2,048 tokens" in reason for reason in advice.reasons)


def test_extreme_memory_needs_a_cache_eight_times_smaller() -> None:
    rows = FULL + cache("full", 4, 0.001, **OTHER) + cache("full", 4.9, 0.001, **ONE)
    assert chosen(rows, "extreme") == "full+int4"
    rows = FULL + cache("full", 6, 0.001, **OTHER) + cache("full", 6, 0.001, **ONE)
    assert advice_on(rows, "extreme").too_little


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (FULL, "no method"),
        (cache("full", 10, 0.0, **OTHER), "full cache was not measured"),
        (FULL + cache("full", 10, 0.001, **OTHER), "a choice needs 2"),
        (
            FULL + cache("full", 10, 0.001, reach=0.5, **OTHER) + cache("full", 20, 0.001, reach=0.5, **ONE),
            "a choice needs 2",
        ),
        (
            [row for row in FULL + cache("full", 10, 0.001, **OTHER) if row.metric != "scored_bytes"],
            "no bytes of the scored cache",
        ),
    ],
)
def test_too_little_data_says_so(rows: list[Row], word: str) -> None:
    advice = advice_on(rows, "shrink")
    assert advice.too_little and advice.choice is None and word in advice.reasons[0]


def test_methods_that_never_compressed_or_beat_the_full_cache_are_not_judged() -> None:
    sound = FULL + cache("full", 20, 0.001, **ONE) + cache("full", 25, 0.001, store="rot8", bits=8)
    idle = [replace(row, value=0.0) if row.metric == "engaged" else row for row in cache("full", 10, 0, **OTHER)]
    better = cache("full", 10, -0.02, **OTHER)
    for suspect, word in ((idle, "never evicted or quantised"), (better, "better than the full cache")):
        advice = advice_on([*sound, *suspect], "shrink")
        assert advice.headline == "full+int8" and any(word in limit for limit in advice.limits)
    pooled = [replace(row, converted=True, kv_heads=1) for row in [*FULL, *cache("full", 1, 0.0, **OTHER)]]
    found = advise(judged_groups([*sound, *pooled]))
    assert all(not one.group.row.converted for one in found)


def test_below_ten_windows_or_without_samples_nothing_is_chosen() -> None:
    rows = FULL + cache("full", 10, 0.001, reach=0.0001, **OTHER) + cache("full", 20, 0.001, reach=0.0001, **ONE)
    assert chosen(rows, "shrink") == "full+int4"
    few = advice_on(rows, "shrink", windows=9)
    assert few.too_little and few.choice is None
    assert "9 windows measured, a verdict needs 10 or more: type perplexity.windows=32 (2)" in few.reasons[0]
    assert advice_on(rows, "shrink", windows=10).headline == "full+int4"
    none = advice_on(rows, "shrink", windows=0)
    assert none.choice is None and "its windows are not in samples.jsonl" in none.reasons[0]


def test_undecided_methods_name_the_windows_that_they_need() -> None:
    wide = cache("h2o", 8, 0.001, reach=0.05, budget=100.0)
    rows = [*FULL, *wide, *cache("full", 10, 0.001, **OTHER), *cache("full", 20, 0.001, **ONE)]
    (limit,) = [limit for limit in advice_on(rows, "shrink").limits if "neither a loss" in limit]
    assert "h2o (16 windows; about" in limit and limit.endswith("needed)")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 39), st.floats(-0.02, 0.3), st.floats(0.0005, 0.2), st.integers(0, 12)),
        min_size=2,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_a_method_that_lost_is_never_recommended(
    members: list[tuple[float, float, float, int]], shuffle: random.Random
) -> None:
    rows = list(FULL)
    for index, (held, loss, reach, hits) in enumerate(members):
        budget = float(100 + index)
        rows += cache("h2o", held, loss, reach=reach, hits=hits, budget=budget)
    shuffle.shuffle(rows)
    for advice in advise(judged_groups(rows)):
        for member in (advice.choice, advice.runner_up):
            if member is None:
                continue
            assert member.verdict is not None and member.verdict.kind == "within_margin"
            row = member.numbers["nll_minus_full"]
            assert row.high is not None and row.high < 0.0101
            needles = member.numbers["hit_rate"]
            assert needles.high is not None and needles.high >= (FULL_NEEDLES.low or 0)


FULL_NEEDLES = judged_groups(FULL)[0].baseline.numbers["hit_rate"]  # type: ignore[union-attr]


def test_every_scenario_lists_what_the_data_do_not_show() -> None:
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 20, 0.001, **ONE)
    for scenario in SCENARIOS:
        assert any("needle measured up to 2,048 tokens only" in limit for limit in advice_on(rows, scenario.key).limits)


def test_a_runner_up_that_holds_less_is_explained() -> None:
    rows = FULL + cache("full", 10, 0.004, **OTHER) + cache("full", 10.5, 0.001, **ONE)
    advice = advice_on(rows, "shrink")
    assert (advice.headline, advice.runner_up.label) == ("full+int8", "full+int4")  # type: ignore[union-attr]
    assert any(reason.startswith("full+int4 holds less by under 10% and is further") for reason in advice.reasons)
    assert "the smaller distance to the full cache decides" in advice_on(rows, "retrieval").limits[-1]
