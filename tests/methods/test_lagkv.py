"""LagKV: ranks each block of tokens relative to the next block, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.methods.lagkv import LagKV
from tests.shared.picks import HKV, B, best, draw, feed, layer_of


def slow_scores(key: torch.Tensor, value: torch.Tensor, tokens: int, n_sink: int, block: int) -> dict[int, float]:
    """The rank of each of the first tokens of key [T, D] and value within its block; inf where it has none."""
    scores = dict.fromkeys(range(tokens), math.inf)
    for i in range(max(0, (tokens - n_sink) // block - 1)):
        here = [n_sink + i * block + j for j in range(block)]
        total = torch.zeros(block, dtype=torch.float64)
        for states in (key.double(), value.double()):
            lag = states[[j + block for j in here]]
            low, high = lag.min(0).values, lag.max(0).values
            total += torch.softmax(((states[here] - low) / (high - low)).std(1), 0) / 2
        order = sorted(range(block), key=lambda j: (float(total[j]), j))
        for rank, j in enumerate(order):
            scores[here[j]] = rank
    return scores


@pytest.mark.parametrize("tokens, budget", [(4 + 5 * 16, 50), (4 + 5 * 16 + 9, 60), (4 + 16, 40), (30, 45)])
def test_lagkv_ranks_each_block_by_the_next(tokens, budget):
    query, key, value = draw(tokens, seed=11)
    layer = layer_of(LagKV(budget=budget, n_sink=4, block=16), query, key, value)
    for b in range(B):
        for kv in range(HKV):
            scores = slow_scores(key[b, kv], value[b, kv], tokens, 4, 16)
            expected = best(scores, budget) if budget < tokens else list(range(tokens))
            assert layer.kept_positions()[b, kv].tolist() == expected


@pytest.mark.parametrize(("prompt", "budget"), [(4 + 5 * 8, 30), (4 + 5 * 8 + 3, 33), (11, 25), (2, 21)])
def test_evicting_block_by_block_keeps_what_the_whole_text_as_a_prompt_keeps(prompt, budget):
    """Ranks are fixed and evictions go from the lowest up, so no token comes back that the whole text would keep."""
    query, key, value = draw(100, seed=11)
    layer = layer_of(
        LagKV(budget=budget, n_sink=4, block=8, decode="evict"),
        *(x[:, :, :prompt] for x in (query, key, value)),
        new=98,
    )
    evictions, kept = 0, layer.kept
    for t in range(prompt, 100):
        feed(layer, query, key, value, t, t + 1)
        if layer.kept <= kept:
            evictions += 1
            for b in range(B):
                for kv in range(HKV):
                    expected = best(slow_scores(key[b, kv], value[b, kv], t + 1, 4, 8), budget)
                    assert layer.kept_positions()[b, kv].tolist() == expected
        kept = layer.kept
        assert kept < budget + 8
    assert evictions == (100 - max(prompt, budget)) // 8


def test_lagkv_survives_a_channel_that_does_not_move():
    query, key, value = draw(4 + 5 * 16)
    key[..., 3] = 1.5
    layer = layer_of(LagKV(budget=50, n_sink=4, block=16), query, key, value)
    assert layer.kept_positions()[0, 0, :4].tolist() == [0, 1, 2, 3]
