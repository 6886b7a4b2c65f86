"""TOVA: evicts the token that the newest query attends to least, against a loop."""

from __future__ import annotations

import math

from kvbench.methods.tova import Tova
from tests.shared.picks import HKV, HQ, B, best, draw, feed, layer_of, probability


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
