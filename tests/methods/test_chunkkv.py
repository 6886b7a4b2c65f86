"""ChunkKV: whole chunks, against loops; chunks of one token are SnapKV's choice."""

from __future__ import annotations

import pytest

from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.snapkv import SnapKV
from tests.shared.picks import HKV, B, best, draw, feed, layer_of, window_sums


@pytest.mark.parametrize(
    "tokens, window, chunk, budget", [(60, 8, 7, 20), (61, 8, 10, 33), (50, 4, 50, 12), (23, 8, 5, 9)]
)
def test_whole_chunks_stay_or_go(tokens: int, window: int, chunk: int, budget: int) -> None:
    query, key, value = draw(tokens)
    layer = layer_of(ChunkKV(budget=budget, window=window, chunk=chunk), query, key, value)
    before = tokens - window
    for b in range(B):
        for kv in range(HKV):
            sums = window_sums(query, key, b, kv, window)
            means = {}
            for start in range(0, before, chunk):
                members = range(start, min(start + chunk, before))
                means |= dict.fromkeys(members, sum(sums[j] for j in members) / len(members))
            expected = [*best(means, budget - window), *range(before, tokens)]
            assert layer.kept_positions()[b, kv].tolist() == expected


def test_chunks_of_one_token_are_snapkv_without_pooling() -> None:
    for seed in range(5):
        query, key, value = draw(70, seed)
        mine = layer_of(ChunkKV(budget=24, window=8, chunk=1), query, key, value).kept_positions()
        theirs = layer_of(SnapKV(budget=24, window=8, pool=1), query, key, value).kept_positions()
        assert mine.tolist() == theirs.tolist()


def test_decode_appends_and_holds_the_budget_when_told() -> None:
    query, key, value = draw(80)
    for decode, expected in (("append", 50), ("evict", 20)):
        rule = ChunkKV(budget=20, window=8, decode=decode)
        layer = layer_of(rule, query[:, :, :50], key[:, :, :50], value[:, :, :50])
        feed(layer, query, key, value, 50, 80)
        assert layer.kept == expected
