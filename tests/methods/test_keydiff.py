"""KeyDiff: keeps keys whose direction differs from the mean direction, against a loop."""

from __future__ import annotations

import math

from kvbench.methods.keydiff import KeyDiff
from tests.shared.picks import HKV, B, best, draw, layer_of


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
