"""The rules that pick by window, norm, direction or lag, against loops over tokens written from their definitions."""

import math
from dataclasses import replace

import pytest
import torch

from kvbench.cache.build import Method, build_layer
from kvbench.cache.layer import SlotLayer
from kvbench.cache.plan import plan_layer
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule, keep_best, lowest
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.kernels.prefill import Scoring
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.lagkv import LagKV
from kvbench.methods.per_token import PerToken
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.random import Random
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova

B, HQ, HKV, D = 2, 4, 2, 16
SCALING = D**-0.5


def draw(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(B, h, tokens, D, generator=generator) * 2 for h in (HQ, HKV, HKV))
    return query, key, value


def layer_of(rule: KeepRule, query, key, value, store: Store | None = None, new=64, index=0, layers=1) -> SlotLayer:
    scoring = Scoring(SCALING)
    observed = {o: o.compute(query, key, scoring) for o in rule.observations()}
    record = LayerRecord(index, key, value, scoring, observed)
    plan = plan_layer(Method("m", rule, store or DenseStore()), record, layers)
    return build_layer(record, replace(plan, max_new_tokens=new))


def probability(query, key, b: int, head: int, row: int, kept: list[int]) -> dict[int, float]:
    """Softmax of one query of one head over the kept tokens up to its own, in float64."""
    kv = head // (HQ // HKV)
    scores = {j: SCALING * float(query[b, head, row].double() @ key[b, kv, j].double()) for j in kept if j <= row}
    top = max(scores.values())
    total = sum(math.exp(s - top) for s in scores.values())
    return {j: math.exp(s - top) / total for j, s in scores.items()}


def best(scores: dict[int, float], count: int) -> list[int]:
    """Tokens of the highest scores; ties give up the older."""
    return sorted(sorted(scores, key=lambda j: (scores[j], j))[len(scores) - count :])


def group(kv: int) -> range:
    return range(kv * HQ // HKV, (kv + 1) * HQ // HKV)


def window_sums(query, key, b: int, kv: int, window: int) -> dict[int, float]:
    tokens = key.shape[2]
    sums = dict.fromkeys(range(tokens), 0.0)
    for head in group(kv):
        for row in range(max(0, tokens - window), tokens):
            for j, p in probability(query, key, b, head, row, list(range(tokens))).items():
                sums[j] += p / (HQ // HKV)
    return sums


def snap_pick(query, key, b: int, kv: int, window: int, pool: int, budget: int) -> list[int]:
    sums, tokens = window_sums(query, key, b, kv, window), key.shape[2]
    before = range(tokens - window)
    pooled = {j: max(sums[i] for i in before if abs(i - j) <= pool // 2) for j in before}
    return best(pooled, budget - window) + list(range(tokens - window, tokens))


@pytest.mark.parametrize("tokens, window, budget", [(60, 8, 20), (60, 8, 59), (23, 8, 9), (40, 32, 36)])
def test_snapkv_keeps_what_its_window_looks_at(tokens, window, budget):
    query, key, value = draw(tokens)
    layer = layer_of(SnapKV(budget=budget, window=window), query, key, value)
    for b in range(B):
        for kv in range(HKV):
            assert layer.kept_positions()[b, kv].tolist() == snap_pick(query, key, b, kv, window, 7, budget)


def test_snapkv_with_a_prompt_inside_the_window_keeps_it_all():
    query, key, value = draw(20)
    layer = layer_of(SnapKV(budget=40, window=32), query, key, value)
    assert layer.kept_positions()[0, 0].tolist() == list(range(20))


def test_snapkv_appends_as_in_the_paper_and_holds_the_budget_when_told():
    query, key, value = draw(90)
    start = 50
    for decode, expected in (("append", 20 + 40), ("evict", 20)):
        rule = SnapKV(budget=20, window=8, decode=decode)
        layer = layer_of(rule, query[:, :, :start], key[:, :, :start], value[:, :, :start])
        feed(layer, query, key, value, start, 90)
        assert layer.kept == expected
        assert layer.kept_positions()[0, 0, -8:].tolist() == list(range(82, 90))


def feed(layer: SlotLayer, query, key, value, start: int, stop: int) -> None:
    for t in range(start, stop):
        layer.update(key[:, :, t : t + 1], value[:, :, t : t + 1])
        layer.attend(query[:, :, t : t + 1], Scoring(SCALING))


def test_snapkv_evicts_by_attention_accumulated_since_the_pick():
    query, key, value = draw(80)
    start, window, budget = 48, 8, 20
    rule = SnapKV(budget=budget, window=window, decode="evict")
    layer = layer_of(rule, query[:, :, :start], key[:, :, :start], value[:, :, :start])
    scores = {}
    for b in range(B):
        for kv in range(HKV):
            sums = window_sums(query[:, :, :start], key[:, :, :start], b, kv, window)
            before = range(start - window)
            pooled = {j: max(sums[i] for i in before if abs(i - j) <= 3) for j in before}
            kept = snap_pick(query[:, :, :start], key[:, :, :start], b, kv, window, 7, budget)
            scores[b, kv] = {j: pooled.get(j, sums[j]) for j in kept}
    for t in range(start, 80):
        feed(layer, query, key, value, t, t + 1)
        for (b, kv), mine in scores.items():
            mine[t] = 0.0
            for head in group(kv):
                for j, p in probability(query, key, b, head, t, list(mine)).items():
                    mine[j] += p / (HQ // HKV)
            old = {j: s for j, s in mine.items() if j <= t - window}
            del mine[min(old, key=lambda j: (old[j], j))]
            assert layer.kept_positions()[b, kv].tolist() == sorted(mine)


def test_tova_drops_what_the_newest_query_attends_to_least_in_all_heads_alike():
    query, key, value = draw(90, seed=3)
    start, budget = 50, 16
    layer = layer_of(Tova(budget=budget), query[:, :, :start], key[:, :, :start], value[:, :, :start])

    def mean_over_heads(b: int, row: int, kept: list[int]) -> dict[int, float]:
        every = [probability(query, key, b, head, row, kept) for head in range(HQ)]
        return {j: sum(p[j] for p in every) / HQ for j in kept}

    kept = {}
    for b in range(B):
        scores = mean_over_heads(b, start - 1, list(range(start)))
        scores[start - 1] = math.inf
        kept[b] = best(scores, budget)
    for t in range(start, 90):
        for b in range(B):
            assert all(layer.kept_positions()[b, kv].tolist() == kept[b] for kv in range(HKV))
            scores = mean_over_heads(b, t, [*kept[b], t])
            scores[t] = math.inf
            kept[b] = best(scores, budget)
        feed(layer, query, key, value, t, t + 1)


def test_knorm_keeps_small_keys_and_the_newest_also_during_decode():
    query, key, value = draw(80, seed=5)
    start, budget = 40, 12
    layer = layer_of(KNorm(budget=budget), query[:, :, :start], key[:, :, :start], value[:, :, :start])
    kept = {}
    for b in range(B):
        for kv in range(HKV):
            scores = {j: -float(key[b, kv, j].norm()) for j in range(start)}
            scores[start - 1] = math.inf
            kept[b, kv] = best(scores, budget)
    for t in range(start, 80):
        for (b, kv), mine in kept.items():
            assert layer.kept_positions()[b, kv].tolist() == mine
            scores = {j: -float(key[b, kv, j].norm()) for j in mine} | {t: math.inf}
            kept[b, kv] = best(scores, budget)
        feed(layer, query, key, value, t, t + 1)


def test_keydiff_keeps_the_keys_that_point_away_from_the_mean_direction():
    query, key, value = draw(50, seed=7)
    layer = layer_of(KeyDiff(budget=15), query, key, value)
    for b in range(B):
        for kv in range(HKV):
            k = key[b, kv].double()
            anchor = sum(row / row.norm() for row in k) / len(k)
            scores = {j: -float(k[j] @ anchor / (k[j].norm() * anchor.norm())) for j in range(50)}
            scores[49] = math.inf
            assert layer.kept_positions()[b, kv].tolist() == best(scores, 15)


@pytest.mark.parametrize("tokens, budget", [(4 + 5 * 16, 50), (4 + 5 * 16 + 9, 60), (4 + 16, 40), (30, 45)])
def test_lagkv_ranks_each_block_by_the_next(tokens, budget):
    query, key, value = draw(tokens, seed=11)
    layer = layer_of(LagKV(budget=budget, n_sink=4, block=16), query, key, value)
    blocks = max(0, (tokens - 4) // 16 - 1)
    for b in range(B):
        for kv in range(HKV):
            scores = dict.fromkeys(range(tokens), math.inf)
            for i in range(blocks):
                here = [4 + i * 16 + j for j in range(16)]
                total = torch.zeros(16, dtype=torch.float64)
                for states in (key[b, kv].double(), value[b, kv].double()):
                    lag = states[[j + 16 for j in here]]
                    low, high = lag.min(0).values, lag.max(0).values
                    total += torch.softmax(((states[here] - low) / (high - low)).std(1), 0) / 2
                order = sorted(range(16), key=lambda j: (float(total[j]), j))
                for rank, j in enumerate(order):
                    scores[here[j]] = rank
            expected = best(scores, budget) if budget < tokens else list(range(tokens))
            assert layer.kept_positions()[b, kv].tolist() == expected


def test_lagkv_survives_a_channel_that_does_not_move():
    query, key, value = draw(4 + 5 * 16)
    key[..., 3] = 1.5
    layer = layer_of(LagKV(budget=50, n_sink=4, block=16), query, key, value)
    assert layer.kept_positions()[0, 0, :4].tolist() == [0, 1, 2, 3]


def test_pyramid_spreads_the_budget_and_one_layer_keeps_it():
    rule = Pyramid(budget=64, window=32, beta=20)
    counts = [rule.layer_tokens(1000, layer, 5) for layer in range(5)]
    low = 32 / 20
    high = 64 - low
    assert counts == [32 + round(high - layer * (high - low) / 4) for layer in range(5)]
    assert abs(sum(counts) / 5 - 64) <= 0.5
    assert rule.layer_tokens(1000, 0, 1) == 64
    one = [Pyramid(budget=33).layer_tokens(1000, layer, 4) for layer in range(4)]
    assert one == [34, 33, 33, 32] and sum(one) == 4 * 33  # the last layer keeps its window alone
    capped = [rule.layer_tokens(80, layer, 5) for layer in range(5)]
    assert capped == [80, 72, 64, 56, 48]  # no layer can hold more than the prompt, and the mean is the budget still
    assert [rule.layer_tokens(60, layer, 5) for layer in range(5)] == [64] * 5
    query, key, value = draw(100)
    layers = [layer_of(rule, query, key, value, index=i, layers=5) for i in range(5)]
    assert [layer.kept for layer in layers] == [rule.layer_tokens(100, i, 5) for i in range(5)]


COARSE = [0.5, 0.25, 0.5, 0.75, 0.25, 0.25, 0.5, 0.75, 0.25, 0.5, 0.75, 0.25, 0.5, 0.25, 0.5, 0.5]
"""Scores as bfloat16 gives them: few distinct values."""
SCORED = {
    "h2o": (H2O(budget=8), lambda p: p >= 12),
    "tova": (Tova(budget=8), lambda p: p == 15),
    "snapkv": (SnapKV(budget=8, window=3), lambda p: p >= 13),
    "pyramid": (Pyramid(budget=8, window=3), lambda p: p >= 13),
    "knorm": (KNorm(budget=8), lambda p: p == 15),
    "keydiff": (KeyDiff(budget=8), lambda p: p == 15),
    "lagkv": (LagKV(budget=8, n_sink=1, block=3), lambda p: False),
}


@pytest.mark.parametrize("name", SCORED)
def test_tied_scores_give_up_the_older_token_whatever_slot_it_is_in(name):
    rule, always = SCORED[name]
    expected = best({p: math.inf if always(p) else score for p, score in enumerate(COARSE)}, 8)
    scores, position = torch.tensor(COARSE).view(1, 1, -1), torch.arange(16).view(1, 1, -1)
    assert keep_best(rule.priority(scores, position, 15, 8, 0), 8).flatten().tolist() == expected
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    scores, position = scores[..., slots], position[..., slots]
    victims = position[0, 0, lowest(rule.priority(scores, position, 15, 8, 0), position, 8).flatten()]
    assert sorted(victims.tolist()) == sorted(set(range(16)) - set(expected))


@pytest.mark.parametrize("rule", [H2O, StreamingLLM, Random, Tova, KNorm])
def test_rules_that_hold_the_budget_cut_only_the_prompt_when_told_to_append(rule):
    query, key, value = draw(60)
    cut = layer_of(rule(budget=20), query[:, :, :40], key[:, :, :40], value[:, :, :40])
    store = Kivi(group_size=16, residual_length=16)  # append-only, and enough now
    method = Method("m", rule(budget=20, decode="append"), store)
    method.check_combination()
    layer = layer_of(method.rule, query[:, :, :40], key[:, :, :40], value[:, :, :40], store)
    assert layer.scores is None  # nothing will be decided any more
    feed(layer, query, key, value, 40, 60)
    assert layer.kept_positions().tolist() == [
        [[*kept, *range(40, 60)] for kept in row] for row in cut.kept_positions().tolist()
    ]


def test_ties_give_up_the_older_token():
    query, key, value = draw(30)
    key[:] = key[:, :, :1]
    for rule in (KNorm(budget=10), KeyDiff(budget=10)):
        assert layer_of(rule, query, key, value).kept_positions()[0, 0].tolist() == list(range(20, 30))


@pytest.mark.parametrize("store", [DenseStore(), PerToken(group_size=16), Kivi(group_size=16, residual_length=16)])
def test_picks_then_appends_on_every_store(store):
    query, key, value = draw(120)
    start = 60
    rule = SnapKV(budget=40, window=8)
    Method("snapkv", rule, store).check_combination()
    layer = layer_of(rule, query[:, :, :start], key[:, :, :start], value[:, :, :start], store)
    feed(layer, query, key, value, start, 120)
    assert layer.kept == 40 + 60
    kept = layer.kept_positions()[0, 0].tolist()
    assert kept == snap_pick(query[:, :, :start], key[:, :, :start], 0, 0, 8, 7, 40) + list(range(start, 120))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SnapKV(budget=32), "budget=33"),
        (lambda: SnapKV(budget=64, window=0), "window=32"),
        (lambda: SnapKV(budget=64, pool=4), "odd"),
        (lambda: SnapKV(budget=64, decode="keep"), "decode=append"),
        (lambda: KNorm(budget=64, decode="x"), "decode=evict"),
        (lambda: KeyDiff(budget=64, decode="evict"), "type decode=append"),
        (lambda: LagKV(budget=100), "budget=260"),
        (lambda: LagKV(budget=500, block=1), "128"),
        (lambda: Tova(), "budget=256"),
        (lambda: Method("snapkv", SnapKV(budget=64, decode="evict"), Kivi()).check_combination(), "store=dense"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(make, words):
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
