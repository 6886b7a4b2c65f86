"""KeyDiff: keeps keys whose direction differs from the mean direction, against a loop."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from kvbench.methods.keydiff import KeyDiff
from tests.shared.picks import HKV, B, best, draw, feed, layer_of


def slow_scores(key: Tensor, held: list[int]) -> dict[int, float]:
    """Minus the cosine of each key [T, D] that is held and the mean direction of all of them; the newest stays."""
    k = key.double()
    anchor = sum(k[j] / k[j].norm() for j in held) / len(held)
    scores = {j: -float(k[j] @ anchor / (k[j].norm() * anchor.norm())) for j in held}
    return {**scores, held[-1]: math.inf}


def test_keydiff_keeps_the_keys_that_point_away_from_the_mean_direction():
    query, key, value = draw(50, seed=7)
    layer = layer_of(KeyDiff(budget=15), query, key, value)
    for b in range(B):
        for kv in range(HKV):
            expected = best(slow_scores(key[b, kv], list(range(50))), 15)
            assert layer.kept_positions()[b, kv].tolist() == expected


@pytest.mark.parametrize("buffer", [1, 6])
def test_evicting_moves_the_mean_to_the_keys_that_are_held(buffer: int) -> None:
    query, key, value = draw(70, seed=7)
    rule = KeyDiff(budget=15, buffer=buffer, decode="evict")
    layer = layer_of(rule, query[:, :, :50], key[:, :, :50], value[:, :, :50])
    held = layer.kept_positions().tolist()
    for t in range(50, 70):
        feed(layer, query, key, value, t, t + 1)
        for b in range(B):
            for kv in range(HKV):
                held[b][kv] = [*held[b][kv], t]
                if len(held[b][kv]) == 15 + buffer:
                    held[b][kv] = best(slow_scores(key[b, kv], held[b][kv]), 15)
        assert layer.kept_positions().tolist() == held
