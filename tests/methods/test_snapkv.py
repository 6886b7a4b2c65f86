"""SnapKV: the tokens that the observation window attends to, against loops."""

from __future__ import annotations

import pytest

from kvbench.cache.build import Method
from kvbench.cache.store import DenseStore
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.snapkv import SnapKV
from tests.shared.picks import HKV, HQ, B, draw, feed, group, layer_of, probability, snap_pick, window_sums


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


def test_ties_on_a_plateau_go_by_the_score_before_pooling():
    """With a budget that cuts a plateau, the peak itself stays; without, the plateau's newest tokens stay."""
    peaks = 0
    for seed in range(10):
        query, key, value = draw(70, seed)
        for budget in range(9, 30):
            kept = {}
            for ties in ("older", "unpooled"):
                layer = layer_of(SnapKV(budget=budget, window=8, ties=ties), query, key, value)
                kept[ties] = layer.kept_positions()
            for b in range(B):
                for kv in range(HKV):
                    sums = window_sums(query, key, b, kv, 8)
                    pooled = {j: max(sums[i] for i in range(62) if abs(i - j) <= 3) for j in range(62)}
                    order = sorted(pooled, key=lambda j: (round(pooled[j], 5), round(sums[j], 5)))
                    expected = sorted(order[62 - (budget - 8) :])
                    assert kept["unpooled"][b, kv, : budget - 8].tolist() == expected
                    peaks += kept["older"][b, kv].tolist() != kept["unpooled"][b, kv].tolist()
        break
    assert peaks > 0
