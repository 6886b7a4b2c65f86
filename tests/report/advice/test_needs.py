"""The answer card follows the rows: swap the numbers and the answer swaps; a future-seeing method is never taken."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.report.advice.answer_card import answer_card
from kvbench.report.advice.card import CardLine
from kvbench.report.advice.needs import EXTREME
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.needle_loss import BEYOND_RECENT, MARGIN
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.results.row import Row
from tests.report.synthetic import FULL, ONE, OTHER, cache, chosen, line_on, windows_of

NEEDS = ("chat", "documents", "code", "architecture", "extreme")


def many_needles(rows: list[Row], hits: float, n: int = 60, metric: str = "hit_rate") -> list[Row]:
    """The rows with `hits` of `n` needles found over all depths, instead of the four at each depth."""
    first = next(row for row in rows if row.measure == "needle")
    pooled = replace(first, depth=None, n=n)
    found = [row for row in rows if row.measure != "needle" or metric != "hit_rate"]
    if metric == "hit_rate":
        found.append(replace(pooled, metric="hits", value=hits))
    return [*found, replace(pooled, metric=metric, value=hits / n)]


def test_the_card_has_a_line_for_each_need_with_what_to_run_where_data_are_missing() -> None:
    card = answer_card(groups_of(FULL))
    assert card is not None and tuple(line.key for line in card.lines) == NEEDS
    for line in card.lines:
        assert line.mark == "not enough data" and line.setting == "–" and line.command is not None
        assert shlex.split(line.command)[:2] == ["python", "-m"]
    assert answer_card([]) is None


def test_the_smaller_cache_within_the_margin_is_taken_and_swapping_the_numbers_swaps_it() -> None:
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 15, 0.001, **ONE)
    line = line_on(rows, "chat")
    assert (line.setting, line.mark, line.smaller, line.budget) == ("full+int4", "", "2.00x", "all tokens")
    assert line.cost == "ΔNLL +0.0010 [-0.0040, +0.0060], KL 5.0e-04" and line.command is None
    rows = FULL + cache("full", 15, 0.001, **OTHER) + cache("full", 10, 0.001, **ONE)
    assert chosen(rows, "chat") == "full+int8"


def test_a_cache_with_loss_is_taken_only_where_none_is_within_the_margin_and_then_by_its_loss() -> None:
    rows = FULL + cache("full", 5, 0.02, **OTHER) + cache("full", 15, 0.001, **ONE)
    assert chosen(rows, "chat") == "full+int8"
    rows = FULL + cache("full", 5, 0.05, hits=12, **OTHER) + cache("full", 15, 0.02, hits=0, **ONE)
    line = line_on(rows, "chat")
    assert (line.setting, line.mark) == ("full+int8", "with loss")  # by the loss, whatever the needles say
    assert line.reasons[0] == "no method is shown to lose less than 0.01 nats"


def test_caches_of_about_one_size_are_told_apart_by_kl() -> None:
    rows = FULL + cache("full", 10, 0.004, **OTHER) + cache("full", 10.5, 0.001, **ONE)
    assert chosen(rows, "chat") == "full+int8"
    rows = FULL + cache("full", 10, 0.001, **OTHER) + cache("full", 10.5, 0.004, **ONE)
    assert chosen(rows, "chat") == "full+int4"


@pytest.mark.parametrize("key", ["chat", "extreme"])
def test_below_ten_windows_the_line_is_marked_and_says_what_to_run(key: str) -> None:
    rows = FULL + cache("full", 10, 0.001, reach=0.0001, **OTHER) + cache("full", 15, 0.001, reach=0.0001, **ONE)
    assert line_on(rows, key, windows=10).mark == ""
    line = line_on(rows, key, windows=9)
    assert (line.setting, line.mark) == ("full+int4", "not enough data")
    assert line.command is not None and "perplexity.windows=32" in line.command and "store=int4" in line.command
    assert any("9 windows; at least 10 needed" in limit for limit in line.limits) and "[" not in line.cost
    none = line_on(rows, key, windows=0)
    assert none.setting == "–" and none.reasons == ["no method with windows in samples.jsonl"]


def test_undecided_methods_name_the_windows_that_they_need() -> None:
    wide = cache("h2o", 5, 0.001, reach=0.05, budget=100.0)
    line = line_on([*FULL, *wide, *cache("full", 10, 0.001, **OTHER)], "chat")
    assert line.setting == "full+int4"
    (limit,) = [limit for limit in line.limits if limit.startswith("smaller, but not enough windows: h2o (about ")]
    assert "windows needed, 4.00x" in limit


def test_the_extreme_is_the_smallest_cache_whose_loss_is_shown_to_stay_below_the_limit() -> None:
    rows = FULL + cache("full", 5, 0.08, **OTHER) + cache("full", 10, 0.001, **ONE)
    line = line_on(rows, "extreme")
    assert (line.setting, line.mark) == ("full+int4", "with loss") and f"{EXTREME:g} nats" in line.ranked_by
    assert not any("needles" in limit for limit in line.limits)
    blind = line_on([*FULL, *cache("full", 5, 0.08, hits=2, **OTHER)], "extreme")
    assert "full+int4 loses needles: 2/12 needles (full cache 12/12)" in blind.limits
    rows = FULL + cache("full", 5, 0.08, reach=0.03, **OTHER) + cache("full", 10, 0.001, **ONE)
    assert (chosen(rows, "extreme"), line_on(rows, "extreme").mark) == ("full+int8", "")
    rows = FULL + cache("full", 5, 0.4, **OTHER) + cache("full", 10, 0.3, **ONE)
    assert (chosen(rows, "extreme"), line_on(rows, "extreme").mark) == ("full+int8", "with loss")


def test_documents_go_by_needles_whatever_the_windows_say() -> None:
    int4, int8 = cache("full", 10, 0.02, **OTHER), cache("full", 15, 0.001, **ONE)
    full = many_needles(FULL, 60)
    line = line_on([*full, *many_needles(int4, 60), *many_needles(int8, 60)], "documents", windows=8)
    assert (line.setting, line.mark) == ("full+int4", "") and line.cost.startswith("60/60 needles (full cache 60/60)")
    assert any("full+int8, KL" in reason for reason in line.reasons)  # the nearest to the full cache
    assert chosen([*full, *many_needles(int4, 30), *many_needles(int8, 60)], "documents") == "full+int8"
    lost = line_on([*full, *many_needles(int4, 20), *many_needles(int8, 30)], "documents")
    assert (lost.setting, lost.mark) == ("full+int8", "with loss")
    worse = line_on([*full, *many_needles(int4, 60), *many_needles(int8, 20)], "documents")
    assert (worse.setting, worse.mark) == ("full+int4", "with loss")  # every needle, and a loss in NLL


def test_few_needles_do_not_show_that_none_is_lost() -> None:
    line = line_on([*FULL, *cache("full", 10, 0.001, **OTHER)], "documents")
    assert (line.setting, line.mark) == ("full+int4", "not enough data")
    (limit,) = [limit for limit in line.limits if "do not exclude" in limit]
    assert limit == "12 needles do not exclude a loss of 24% of them; about 35 needed"
    assert line.command is not None and "needle.samples=17" in line.command
    enough = [*many_needles(FULL, 35, 35), *many_needles(cache("full", 10, 0.001, **OTHER), 35, 35)]
    assert line_on(enough, "documents").mark == "" and f"{MARGIN:.0%}" in line.ranked_by


def test_hits_that_needed_memory_go_before_all_hits() -> None:
    def beyond(rows: list[Row], hits: float, n: int = 60) -> list[Row]:
        """60 needles found of 60, and of the n before the newest tokens `hits`, the full cache all of them."""
        rows = many_needles(many_needles(rows, 60), hits, n, metric=BEYOND_RECENT)
        rate = next(row for row in rows if row.metric == BEYOND_RECENT)
        above = replace(rate, metric=f"{BEYOND_RECENT}_minus_full", value=hits / n - 1, low=hits / n - 1.08, high=0.02)
        return [*rows, replace(above, high=hits / n - 0.92)]

    recent, keeps = cache("h2o", 5, 0.001, budget=64.0), cache("full", 10, 0.001, **OTHER)
    rows = [*FULL, *many_needles(FULL, 60), *beyond(recent, 12), *beyond(keeps, 60)]
    line = line_on(rows, "documents")
    assert (line.setting, line.mark) == ("full+int4", "") and "before the newest tokens" in line.ranked_by
    assert line.cost.startswith("60/60 needles (full cache 60/60)")
    whole = [*many_needles(FULL, 60), *many_needles(recent, 60), *many_needles(keeps, 60)]
    assert chosen(whole, "documents") == "h2o"
    # Where the budget holds every needle, the method was not tested for memory.
    untested = [*FULL, *many_needles(FULL, 60), *many_needles(recent, 60), *beyond(keeps, 60)]
    assert chosen(untested, "documents") == "full+int4"


def on_texts(losses: dict[str, float], windows: int = 16) -> tuple[list[Row], list[WindowSample]]:
    """full+int4 and the full cache over texts, with rows and windows over all of them and of each."""
    rows, samples = [], []
    pooled = "+".join(losses)
    for own in (FULL, cache("full", 10, sum(losses.values()) / len(losses), **OTHER)):
        rows += [replace(row, dataset=pooled, run="one") if row.measure == "perplexity" else row for row in own]
        for text, loss in losses.items():
            single = [replace(row, dataset=text, run="one") for row in own if row.metric in ("nll_minus_full", "kl")]
            rows += [replace(row, value=loss) for row in single]
    made = windows_of([row for row in rows if row.dataset == pooled], windows=1)
    for sample in made:
        for text, loss in losses.items():
            for place in range(windows):
                difference = loss + 0.001 * (-1) ** place
                samples.append(
                    replace(
                        sample,
                        window=f"{text} {place}",
                        difference=difference,
                        text=text,
                        scores={"kl": loss / 2 + 1e-6},
                    )
                )
    return rows, samples


def lines_on_texts(losses: dict[str, float], windows: int = 16) -> dict[str, CardLine]:
    rows, samples = on_texts(losses, windows)
    evidence = evidence_of(samples)
    card = answer_card(groups_of(rows, evidence), evidence)
    assert card is not None
    return {line.key: line for line in card.lines}


def test_chat_reads_prose_and_code_reads_code() -> None:
    lines = lines_on_texts({"essays": 0.001, "bible": 0.002, "code": 0.2})
    assert (lines["chat"].mark, lines["code"].mark) == ("", "with loss")
    assert lines["chat"].cost.startswith("ΔNLL +0.0015") and lines["code"].cost.startswith("ΔNLL +0.2")
    assert "essays+bible" in lines["chat"].ranked_by and "on code" in lines["code"].ranked_by
    assert any("32 windows of essays+bible" in limit for limit in lines["chat"].limits)
    lines = lines_on_texts({"essays": 0.2, "code": 0.001})
    assert (lines["chat"].mark, lines["code"].mark) == ("with loss", "")
    few = lines_on_texts({"essays": 0.004, "code": 0.2}, windows=6)["chat"]
    assert few.mark == "not enough data" and few.command is not None and "windows=32" in few.command
    without = lines_on_texts({"essays": 0.2, "bible": 0.001})
    assert without["code"].setting == "–" and without["code"].reasons == ["no code was scored"]


def test_methods_that_see_the_future_need_training_or_never_compressed_are_not_taken() -> None:
    sound = FULL + cache("full", 15, 0.001, **ONE)
    future = [replace(row, flags="sees_future") for row in cache("mine", 2, 0.0, budget=64.0)]
    idle = [replace(row, value=0.0) if row.metric == "engaged" else row for row in cache("full", 10, 0, **OTHER)]
    better = cache("full", 10, -0.02, **OTHER)
    for suspect, word in (
        (cache("hindsight", 2, 0.0, budget=64.0), "sees the future"),
        (cache("hindsight", 2, 0.0, budget=64.0, variant="output"), "sees the future"),
        (future, "sees the future"),
        (idle, "never evicted or quantised anything"),
        (better, "look for a fault first"),
    ):
        for key in ("chat", "documents", "extreme"):
            line = line_on([*sound, *suspect], key)
            assert line.setting == "full+int8" and any(word in limit for limit in line.limits)


def test_quality_of_converted_or_random_weights_gives_no_line() -> None:
    sound = FULL + cache("full", 10, 0.001, **OTHER)
    pooled = [replace(row, converted=True, kv_heads=1) for row in sound]
    card = answer_card(groups_of([*sound, *pooled]))
    assert card is not None and all(not line.group.row.converted for line in card.lines)
    line = line_on([replace(row, weights="random") for row in sound], "chat")
    assert line.setting == "–" and line.reasons == ["random weights: quality says nothing"]
    assert line.command is not None and "model=" not in line.command


def test_speed_is_a_ratio_to_the_full_cache_of_the_same_run() -> None:
    def line(run: str) -> CardLine:
        method = cache("full", 10, 0.001, **OTHER)
        timed = [
            replace(row, run=of, measure="latency", metric="tpot_p50_ms", value=value, unit="ms", context=512)
            for row, value, of in ((FULL[0], 10.0, "one"), (method[0], 8.0, run))
        ]
        return line_on([*FULL, *method, *timed], "chat")

    assert line("one").speed == "0.80x at 512 tokens"
    assert line("two").speed == "full cache timed in another run"
    assert line_on([*FULL, *cache("full", 10, 0.001, **OTHER)], "chat").speed == "not measured"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 39), st.floats(-0.02, 0.3), st.floats(0.0005, 0.2), st.integers(0, 12)),
        min_size=2,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_an_answer_without_a_mark_is_always_shown_by_its_windows(
    members: list[tuple[float, float, float, int]], shuffle: random.Random
) -> None:
    rows = list(FULL)
    for index, (held, loss, reach, hits) in enumerate(members):
        rows += cache("h2o", held, loss, reach=reach, hits=hits, budget=float(100 + index))
    rows += cache("hindsight", 0.5, 0.0, budget=64.0)
    shuffle.shuffle(rows)
    for key, limit in (("chat", 0.01), ("extreme", EXTREME)):
        line = line_on(rows, key)
        if line.choice is None:
            continue
        assert line.choice.row.method != "hindsight"
        row = line.choice.numbers["nll_minus_full"]
        assert row.low is not None and row.high is not None
        if line.mark == "":
            assert row.high < limit + 1e-6
        elif line.mark == "with loss":
            assert row.low > -1e-6
