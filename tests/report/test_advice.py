"""Advice follows the rows: swap the numbers and the recommendation swaps; what lost is never recommended."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.report.advice import SCENARIOS, advise
from kvbench.report.candidates import groups_of, setting_of
from kvbench.report.findings import find_all
from kvbench.report.overview import overview
from kvbench.report.summary import summary
from kvbench.report.traits import traits_of
from kvbench.report.traits_table import traits_table
from kvbench.report.verdict import Advice
from kvbench.results.row import Row
from tests.shared.rows import BASE

MIB = 2.0**20


def cache(
    method: str,
    held: float,
    loss: float,
    *,
    reach: float = 0.005,
    hits: int = 12,
    budget: float | None = None,
    store: str = "dense",
    **more: Any,
) -> list[Row]:
    """A method that holds `held` MiB of the full cache's 40 and lost `loss` nats, give or take `reach`."""
    start = replace(BASE, method=method, store=store, budget=budget, **more)
    full = method == "full" and store == "dense"
    seen = replace(start, measure="perplexity", context=1024, n=1024, protocol="prefill_decode", batch=1)
    bounds = {"low": loss - reach, "high": loss + reach} if not full else {"low": 0.0, "high": 0.0}
    found = [
        replace(seen, metric="nll_minus_full", value=loss, **bounds),
        replace(seen, metric="ppl", value=20 * math.exp(loss), low=19 * math.exp(loss), high=21 * math.exp(loss)),
        replace(seen, metric="kl", value=abs(loss) / 2 + 1e-6, low=abs(loss) / 2.1, high=abs(loss) / 1.9 + 2e-6),
        replace(seen, metric="engaged", value=0.0 if full else 0.99),
        replace(seen, metric="kept_tokens", value=budget or 1151.0),
    ]
    found.append(replace(start, measure="memory", context=2048, metric="held_bytes", value=held * MIB, unit="bytes"))
    for depth in (0.1, 0.5, 0.9):
        there = replace(start, measure="needle", context=2048, question="after", depth=depth, n=4)
        part = min(4, max(0, hits - {0.1: 0, 0.5: 4, 0.9: 8}[depth]))
        found += [replace(there, metric="hits", value=float(part)), replace(there, metric="hit_rate", value=part / 4)]
    return found


FULL = cache("full", 40, 0)
ONE = {"store": "int8", "bits": 8}
OTHER = {"store": "int4", "bits": 4}


def said(rows: Sequence[Row], key: str) -> Advice:
    return next(one for one in advise(groups_of(rows)) if one.key == key)


def chosen(rows: Sequence[Row], key: str) -> str:
    return said(rows, key).headline


def test_the_smaller_cache_without_a_loss_is_chosen_and_swapping_the_numbers_swaps_it() -> None:
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 20, 0.001, **ONE)
    assert chosen(rows, "shrink") == "full+int4"
    assert said(rows, "shrink").runner_up.label == "full+int8"  # type: ignore[union-attr]
    rows = FULL + cache("full", 20, 0.001, **OTHER) + cache("full", 10, 0.001, **ONE)
    assert chosen(rows, "shrink") == "full+int8"


def test_a_loss_beyond_the_interval_is_never_recommended_and_named_as_the_price_of_going_further() -> None:
    rows = FULL + cache("full", 10, 0.02, **OTHER) + cache("full", 20, 0.001, **ONE)
    advice = said(rows, "shrink")
    assert advice.headline == "full+int8" and advice.runner_up is None
    assert any(reason.startswith("going further costs quality: full+int4") for reason in advice.reasons)
    rows = FULL + cache("full", 10, 0.02, **OTHER) + cache("full", 20, 0.01, **ONE)
    assert chosen(rows, "shrink") == "no method without a measured loss"


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
    advice = said(rows, "retrieval")
    assert advice.choice is None and any("3/12 needles at 2,048 tokens" in reason for reason in advice.reasons)


def test_extreme_memory_needs_an_eighth() -> None:
    rows = FULL + cache("full", 4, 0.001, **OTHER) + cache("full", 4.9, 0.001, **ONE)
    assert chosen(rows, "extreme") == "full+int4"
    rows = FULL + cache("full", 6, 0.001, **OTHER) + cache("full", 6, 0.001, **ONE)
    assert said(rows, "extreme").too_little


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (FULL, "no method"),
        (cache("full", 10, 0.0, **OTHER), "full cache was not measured"),
        (FULL + cache("full", 10, 0.001, **OTHER), "takes 2"),
        (FULL + cache("full", 10, 0.001, reach=0.5, **OTHER) + cache("full", 20, 0.001, reach=0.5, **ONE), "takes 2"),
        ([row for row in FULL + cache("full", 10, 0.001, **OTHER) if row.measure != "memory"], "no memory"),
    ],
)
def test_too_little_data_says_so(rows: list[Row], word: str) -> None:
    advice = said(rows, "shrink")
    assert advice.too_little and advice.choice is None and word in advice.reasons[0]


def test_what_never_engaged_was_converted_or_beat_the_full_cache_is_not_judged() -> None:
    sound = FULL + cache("full", 20, 0.001, **ONE) + cache("full", 25, 0.001, store="rot8", bits=8)
    idle = [replace(row, value=0.0) if row.metric == "engaged" else row for row in cache("full", 10, 0, **OTHER)]
    better = cache("full", 10, -0.02, **OTHER)
    for suspect, word in ((idle, "never engaged"), (better, "better than the full cache")):
        advice = said([*sound, *suspect], "shrink")
        assert advice.headline == "full+int8" and any(word in limit for limit in advice.limits)
    pooled = [replace(row, converted=True, kv_heads=1) for row in [*FULL, *cache("full", 1, 0.0, **OTHER)]]
    found = advise(groups_of([*sound, *pooled]))
    assert all(not one.group.row.converted for one in found)


def test_architectures_need_two_and_a_quality_to_compare() -> None:
    assert said(FULL, "architecture").too_little
    other = [replace(row, model="org/Other", arch="mla") for row in cache("full", 5, 0)]
    assert said([*FULL, *other], "architecture").answer == "mla (Other)"
    worse = [replace(row, model="org/Other", arch="mla") for row in cache("full", 5, 1.0)]
    assert said([*FULL, *worse], "architecture").answer == "gqa (Toy-135M)"
    pooled = [replace(row, converted=True) for row in other]
    advice = said([*FULL, *pooled], "architecture")
    assert advice.too_little and any("converted" in limit for limit in advice.limits)
    foreign = [replace(row, tokenizer="other") for row in other]
    assert said([*FULL, *foreign], "architecture").answer is None


RANDOM = "random weights, for speed and memory only"


def latents() -> list[Row]:
    """A model of random weights in two MLA layouts, int4 beside the full cache of each."""
    made = []
    for layout, heads, mib in (("expand", 16, 40.0), ("absorbed", 1, 4.0)):
        told = {"model": "org/Latent", "arch": "mla", "kv_heads": heads, "knobs": f'{{"mla": "{layout}"}}'}
        for rows in (cache("full", mib, 0.0), cache("full", mib / 5, 0.0, store="int4", bits=4)):
            made += [replace(row, note=RANDOM, **told) for row in rows]
    return made


def test_layouts_are_held_against_their_own_full_cache_and_random_weights_are_never_advised() -> None:
    groups = groups_of([*latents(), *FULL, *cache("full", 20, 0.001, **ONE)])
    assert [group.row.model for group in groups] == ["org/Toy-135M", "org/Latent", "org/Latent"]  # random weights last
    assert [group.ratio(group.members[0]) for group in groups[1:]] == [pytest.approx(5)] * 2
    assert [setting_of(group, groups) for group in groups[1:]] == ["Latent, mla expand", "Latent, mla absorbed"]
    assert {one.group.row.model for one in advise(groups)} == {"org/Toy-135M"}
    (told,) = [finding for finding in find_all(latents()) if finding.kind == "random weights"]
    assert told.text.startswith("org/Latent: ")
    assert not [finding for finding in find_all(latents()) if finding.kind == "missing"]


def test_what_a_window_bounds_anyway_is_said_and_unsteady_times_say_whose() -> None:
    share = [replace(row, metric="compressible_share", value=0.289) for row in FULL if row.measure == "memory"]
    assert ", 28.9% of it in layers that methods can compress" in summary(groups_of([*FULL, *share]))[0]
    note = "graph off; unsteady: the halves differ; random weights, for speed and memory only"
    shaky = replace(FULL[0], measure="latency", context=1024, metric="steady", value=0.0, note=note)
    (alone,) = [finding.text for finding in find_all([*FULL, shaky]) if finding.kind == "unsteady timing"]
    assert alone.endswith("latency at context 1,024: the halves differ")
    (told,) = [finding.text for finding in find_all([*latents(), shaky]) if finding.kind == "unsteady timing"]
    assert told.endswith("latency at context 1,024: Toy-135M with 3 KV heads, the halves differ")


def test_architectures_stand_in_one_table_with_sizes_first_and_where_weights_are_from() -> None:
    """Sizes by token, and each lot of weights by its kind; the smallest is marked in each architecture by itself."""
    less = cache("full", 20, 0.001, **ONE)
    sizes = [
        replace(row, metric="bytes_per_token", value=1e5)
        for row in [*FULL, *less]
        if (row.measure, row.metric) == ("memory", "held_bytes")
    ]
    assert len(sizes) == 2
    heads = [replace(row, kv_heads=9, arch="mha", converted=True, note="3 -> 9: same logits") for row in FULL]
    pooled = [replace(row, kv_heads=1, arch="mqa", converted=True, note="3 -> 1: not lossless") for row in FULL]
    table = overview(groups_of([*FULL, *sizes, *less, *heads, *pooled, *latents()]))
    assert table is not None
    cells = {column.key: column.full for column in table.columns}
    assert cells["weights"] == ["trained"] * 2 + ["heads repeated", "heads mean-pooled"] + ["random"] * 4
    assert cells["kv_heads"] == ["3", "3", "9", "1", "16", "16", "1", "1"] and "converted" not in cells
    keys = [column.key for column in table.columns]
    assert keys.index("held_bytes") < keys.index("bytes_per_token") < keys.index("ppl") < keys.index("kl")
    held = next(column for column in table.columns if column.key == "held_bytes")
    assert "measured" not in cells and held.best == frozenset()  # of one method each there is no better one


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ("3 -> 9: same logits", "heads repeated, for a larger cache than the model's own"),
        ("3 -> 1: not lossless", "heads mean-pooled, and not trained so"),
        ("random weights", "random weights"),
    ],
)
def test_of_weights_that_were_not_trained_so_the_summary_says_what_they_are(note: str, reason: str) -> None:
    made = [replace(row, kv_heads=9, converted="->" in note, note=note) for row in [*FULL, *cache("h2o", 20, 0.001)]]
    assert any(f"1 cannot be judged ({reason})" in line for line in summary(groups_of(made)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 39), st.floats(-0.02, 0.3), st.floats(0.0005, 0.2), st.integers(0, 12)),
        min_size=2,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_never_recommends_what_lost(members: list[tuple[float, float, float, int]], shuffle: random.Random) -> None:
    rows = list(FULL)
    for index, (held, loss, reach, hits) in enumerate(members):
        budget = float(100 + index)
        rows += cache("h2o", held, loss, reach=reach, hits=hits, budget=budget)
    shuffle.shuffle(rows)
    for advice in advise(groups_of(rows)):
        for member in (advice.choice, advice.runner_up):
            if member is None:
                continue
            row = member.numbers["nll_minus_full"]
            assert row.low is not None and row.high is not None and row.low <= 0 <= row.high
            needles = member.numbers["hit_rate"]
            assert needles.high is not None and needles.high >= (FULL_NEEDLES.low or 0)


FULL_NEEDLES = groups_of(FULL)[0].baseline.numbers["hit_rate"]  # type: ignore[union-attr]


def test_every_scenario_says_what_the_data_cannot() -> None:
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 20, 0.001, **ONE)
    for scenario in SCENARIOS:
        assert any("needle measured up to 2,048 tokens only" in limit for limit in said(rows, scenario.key).limits)


def test_summary_overview_and_traits_carry_the_same_numbers() -> None:
    groups = groups_of(FULL + cache("full", 10, 0.001, **OTHER) + cache("h2o", 4, 0.2, hits=3, budget=100.0))
    text = " ".join(summary(groups))
    assert "full+int4 in 10.0 MiB (4.0x less)" in text and "h2o: 4.00 MiB (10.0x less)" in text
    table = overview(groups)
    assert table is not None and table.columns[0].full == ["full", "full+int4", "h2o"]
    held = next(column for column in table.columns if column.key == "held_bytes")
    assert held.full == ["40.0", "10.0", "4.00"] and held.best == {2}
    loss = next(column for column in table.columns if column.key == "nll_minus_full")
    assert loss.best == {1}
    traits = traits_table(groups)
    assert traits is not None
    told = {column.key: column.full for column in traits.columns}
    assert told["gain measured"] == ["4.0x", "10.0x"] and told["history"] == ["kept", "lost"]
    assert told["size bounded"] == ["no", "yes"] and told["shrinks"] == ["bits", "tokens"]


def test_traits_come_from_the_config_and_are_unknown_for_what_is_not_there() -> None:
    assert traits_of(Row(method="h2o", store="int4")).shrinks == "tokens, bits"
    assert traits_of(Row(method="h2o", knobs='{"decode": "append"}')).bounded is False
    assert traits_of(Row(method="of_mine", store="../../secret")).shrinks is None


def test_retrieval_counts_the_tasks_that_the_full_cache_solves() -> None:
    def task(rows: list[Row], name: str, hits: float) -> list[Row]:
        """The needle rows once more, under another task and with `hits` in each depth."""
        found = [replace(row, protocol=name) for row in rows if row.measure == "needle"]
        return [replace(row, value=hits if row.metric == "hits" else hits / 4) for row in found]

    int4, int8 = cache("full", 10, 0.001, **OTHER), cache("full", 20, 0.001, **ONE)
    easy = FULL + int4 + int8
    hard = task(FULL, "hard", 1) + task(int4, "hard", 0) + task(int8, "hard", 0)
    (group,) = groups_of(easy + hard)
    assert [member.numbers["hit_rate"].n for member in group.members] == [12, 12]
    second = task(FULL, "second", 4) + task(int4, "second", 2) + task(int8, "second", 4)
    (group,) = groups_of(easy + hard + second)
    assert [member.numbers["hit_rate"].n for member in group.members] == [24, 24]
    assert [member.value("hit_rate") for member in group.members] == [0.75, 1]
    assert chosen(easy + second, "retrieval") == "full+int8"


def test_of_two_counts_of_bytes_the_one_of_more_methods_serves() -> None:
    members = [cache("h2o", held, 0.001, budget=budget) for held, budget in ((4.0, 100.0), (8.0, 200.0))]
    made = [*FULL, *members[0], *members[1]]
    at = [replace(row, metric="held_bytes", value=2.0**24, unit="bytes") for row in made if row.metric == "ppl"]
    (both,) = groups_of([*made, *at])
    assert both.contexts["memory"] == 2048 and [one.held for one in both.members] == [4 * MIB, 8 * MIB]
    fewer = [row for row in made if not (row.metric == "held_bytes" and row.budget == 200)]
    (group,) = groups_of([*fewer, *at])
    assert group.contexts["memory"] == 1024 and {one.held for one in group.members} == {2.0**24}
    assert "memory at 1,024 tokens" in overview([group]).caption  # type: ignore[union-attr]


def test_a_runner_up_that_holds_less_is_explained() -> None:
    rows = FULL + cache("full", 10, 0.004, **OTHER) + cache("full", 10.5, 0.001, **ONE)
    advice = said(rows, "shrink")
    assert (advice.headline, advice.runner_up.label) == ("full+int8", "full+int4")  # type: ignore[union-attr]
    assert any(reason.startswith("full+int4 holds hardly less and is further") for reason in advice.reasons)
    assert "nearness to the full cache decides" in said(rows, "retrieval").limits[-1]


def test_summary_says_what_lost_what_is_unknown_and_counts_settings() -> None:
    lost = [cache("h2o", held, 0.2, budget=budget) for held, budget in ((4.0, 100.0), (8.0, 200.0))]
    (group,) = groups_of([*FULL, *lost[0], *lost[1], *cache("full", 9, 0.01, reach=0.1, **OTHER)])
    scope, none, *_ = summary([group])
    assert scope.startswith("2 methods in 3 settings against the full cache, which has a perplexity of 20.00")
    assert none.startswith("Of the 3 methods none is shown to keep up") and "2 lost beyond the interval" in none
    assert "1 cannot be judged (its loss is not known to better than 0.05 nats)" in none
