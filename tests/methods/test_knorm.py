"""Key norm: keeps keys of small norm, against a loop."""

from __future__ import annotations

import math

from kvbench.methods.knorm import KNorm
from tests.shared.picks import HKV, B, best, draw, feed, layer_of


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


def test_first_layers_that_are_skipped_keep_every_token() -> None:
    rule = KNorm(budget=12, skip_layers=2)
    assert [rule.layer_tokens(40, layer, 4) for layer in range(4)] == [None, None, 12, 12]
