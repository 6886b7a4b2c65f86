"""CriticalKV against loops, and norms of W_o v against the model's own projection."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.observe import LastQueries
from kvbench.cache.output_norms import OutputNorms
from kvbench.cache.record import LayerRecord
from kvbench.cache.store import DenseStore
from kvbench.kernels.prefill import Scoring
from kvbench.methods.critical import Critical
from kvbench.methods.snapkv import SnapKV
from tests.shared.picks import HKV, HQ, SCALING, B, best, draw, window_sums
from tests.shared.scoring import MODEL, TEXT


def record_of(tokens: int, window: int, norms: torch.Tensor, seed: int = 0) -> tuple[LayerRecord, torch.Tensor]:
    query, key, value = draw(tokens, seed)
    scoring = Scoring(SCALING)
    seen = LastQueries(window)
    observed = {seen: seen.compute(query, key, scoring), OutputNorms(1): norms}
    return LayerRecord(0, key, value, scoring, observed), query


def kept(rule: Critical | SnapKV, record: LayerRecord, budget: int) -> list[list[list[int]]]:
    tokens = record.key.shape[2]
    position = torch.arange(tokens).expand(record.key.shape[:3])
    priority = rule.priority(rule.initial_scores(record), position, tokens - 1, budget, 0)
    order = priority.sort(dim=-1, stable=True).indices[..., tokens - budget :].sort(-1).values
    found: list[list[list[int]]] = order.tolist()
    return found


@pytest.mark.parametrize("tokens, window, budget", [(60, 8, 20), (60, 8, 59), (40, 16, 19)])
def test_two_stages_against_loops(tokens: int, window: int, budget: int) -> None:
    norms = torch.rand(B, HKV, HQ // HKV, tokens, generator=torch.Generator().manual_seed(3)) * 9
    record, query = record_of(tokens, window, norms)
    mine = kept(Critical(budget, window=window), record, budget)
    before = tokens - window
    for b in range(B):
        for kv in range(HKV):
            sums = window_sums(query, record.key, b, kv, window)
            pooled = {j: max(sums[i] for i in range(before) if abs(i - j) <= 3) / window for j in range(before)}
            first = best(pooled, (budget - window) // 2)
            others = {j: (pooled[j] + 1e-4) * float(norms[b, kv, :, j].mean()) for j in pooled if j not in first}
            second = best(others, budget - window - len(first))
            assert mine[b][kv] == sorted([*first, *second, *range(before, tokens)])


def test_equal_norms_give_snapkvs_choice() -> None:
    for seed in range(5):
        record, _ = record_of(70, 8, torch.full((B, HKV, HQ // HKV, 70), 2.5), seed)
        assert kept(Critical(24, window=8), record, 24) == kept(SnapKV(24, window=8), record, 24)


@pytest.mark.parametrize("order", [1, 2])
def test_norms_are_those_of_the_models_projection(order: int) -> None:
    ids = TEXT[None, :30]
    values: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda *given: values.append(given[2]))
        for layer in MODEL.model.layers
    ]
    MODEL(input_ids=ids)
    for hook in hooks:
        hook.remove()

    class Wants(SnapKV):
        def observations(self):
            return (OutputNorms(order),)

    record = prefill(MODEL, ids, [Wants(8, window=4)])
    for layer, value in zip(record.layers, values, strict=True):
        weight = MODEL.model.layers[layer.index].self_attn.o_proj.weight
        for head in range(4):
            alone = torch.zeros(30, 4 * 16)
            alone[:, 16 * head : 16 * (head + 1)] = value[0].unflatten(-1, (2, 16))[:, head // 2]
            expected = (alone @ weight.T).norm(p=order, dim=-1)
            assert torch.allclose(layer.observed[OutputNorms(order)][0, head // 2, head % 2], expected, rtol=1e-5)


def test_it_runs_through_a_model() -> None:
    cache = build_cache(MODEL, Method("critical", Critical(12, window=4), DenseStore()), TEXT[None, :40])
    assert cache.kept_tokens == 12
