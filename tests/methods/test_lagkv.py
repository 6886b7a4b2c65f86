"""LagKV: ranks each block of tokens relative to the next block, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.methods.lagkv import LagKV
from tests.shared.picks import HKV, B, best, draw, layer_of


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
