"""PyramidKV: budgets by layer."""

from __future__ import annotations

from kvbench.methods.pyramid import Pyramid
from tests.shared.picks import draw, layer_of


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
