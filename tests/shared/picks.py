"""Loops over tokens for rules that pick tokens of a prompt, and one layer built without a model."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvbench.cache.build import Method, build_layer
from kvbench.cache.layer import SlotLayer
from kvbench.cache.plan import plan_layer
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.kernels.prefill import Scoring
from tests.shared.observing import observed_of

B, HQ, HKV, D = 2, 4, 2, 16
SCALING = D**-0.5


def draw(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(B, h, tokens, D, generator=generator) * 2 for h in (HQ, HKV, HKV))
    return query, key, value


def layer_of(rule: KeepRule, query, key, value, store: Store | None = None, new=64, index=0, layers=1) -> SlotLayer:
    scoring = Scoring(SCALING)
    observed = observed_of(rule, query, key, scoring)
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


def feed(layer: SlotLayer, query, key, value, start: int, stop: int) -> None:
    for t in range(start, stop):
        layer.update(key[:, :, t : t + 1], value[:, :, t : t + 1])
        layer.attend(query[:, :, t : t + 1], Scoring(SCALING))
