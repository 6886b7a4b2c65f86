"""ThinK's store against a loop over heads and channels, at all channels against the full cache, and its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import step
from kvbench.cache.observe import QueryPower
from kvbench.cache.store import DenseStore, SlotShape
from kvbench.errors import UserError
from kvbench.kernels import choose
from kvbench.kernels.parts import read_all
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.think import Think, ThinkSlots
from tests.shared.models import random_llama
from tests.shared.reference import attention_matrix, attention_output

CPU = torch.device("cpu")
D, KV_HEADS, GROUP, PROMPT, STEPS = 32, 2, 3, 70, 12
MODEL = random_llama(KV_HEADS * GROUP, KV_HEADS, D, dtype=torch.float32)
EXACT = random_llama(KV_HEADS * GROUP, KV_HEADS, D)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(97, (batch, tokens), generator=torch.Generator().manual_seed(0))


def chosen(queries: Tensor, keys: Tensor, count: int) -> list[int]:
    """Channels of one KV head, from its queries [heads, T, D] and keys [T, D], one number after another."""
    scores = []
    for c in range(keys.shape[1]):
        by_head = []
        for head in queries:
            last = [float(q[c]) ** 2 for q in head[-32:]]
            by_head.append(sum(last) / len(last))
        square = sum(float(k[c]) ** 2 for k in keys) / len(keys)
        scores.append(sum(by_head) / len(by_head) * square)
    return sorted(sorted(range(keys.shape[1]), key=lambda c: (-scores[c], c))[:count])


@pytest.mark.parametrize(("share", "residual"), [(0.6, 32), (0.25, 5), (0.01, 1), (0.5, 500)])
def test_channels_and_attention_are_those_of_the_definition(share: float, residual: int) -> None:
    """Batch 2, grouped heads, decode in steps of 1 and 3: pruned keys with zeros, the newest ones whole."""
    count = max(1, round(share * D))
    query, key, value = (noise(2, heads, PROMPT + STEPS, D, seed=heads) for heads in (6, 2, 2))
    query = query * torch.linspace(0.2, 3, D)  # channels of unequal size
    key[:, 1] *= torch.linspace(2, 0.1, D)
    power = QueryPower().compute(query[:, :, :PROMPT], key, None)  # type: ignore[arg-type]
    store = Think(share, residual).with_observed({QueryPower(): power})
    slots = store.allocate(SlotShape(2, 2, D, D, PROMPT + STEPS, 3, torch.float64, CPU))
    slots.fill(key[:, :, :PROMPT], value[:, :, :PROMPT])
    slots.settle()
    mask = torch.zeros(2, 2, D, dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            mask[b, h, chosen(query[b, 3 * h : 3 * h + 3, :PROMPT], key[b, h, :PROMPT], count)] = 1
    length = PROMPT
    for q in (1, 1, 3, 1, 3, 3):
        slots.append(key[:, :, length : length + q], value[:, :, length : length + q])
        want = key[:, :, : length + q].clone()
        pruned = max(0, length - residual)
        want[:, :, :pruned] *= mask[:, :, None]
        assert torch.equal(read_all(slots.key_parts(), torch.float64), want)
        assert torch.equal(read_all(slots.value_parts(), torch.float64), value[:, :, : length + q])
        slots.settle()
        length += q
    assert slots.has_quantised == (residual < PROMPT)


@pytest.mark.parametrize(
    "rule", [Full(), H2O(budget=30, decode="append"), SnapKV(budget=50)], ids=lambda r: type(r).__name__
)
def test_all_channels_are_the_full_cache_to_the_bit(rule: Full | H2O | SnapKV) -> None:
    ids, logits = random_ids(2, PROMPT + STEPS), []
    for store in (DenseStore(), Think(channels=1.0)):
        cache = build_cache(MODEL, Method("m", rule, store), ids[:, :PROMPT], STEPS)
        logits.append(torch.cat([step(MODEL, ids[:, t : t + 1], cache) for t in range(PROMPT, PROMPT + STEPS)]))
    assert torch.equal(*logits)


def test_rows_of_all_channels_are_bit_by_bit_those_of_the_keys() -> None:
    key = noise(2, 2, 50, D).float()
    slots = ThinkSlots(Think(1.0, 8), SlotShape(2, 2, D, D, 50, 1, torch.float32, CPU))
    slots.fill(key, key)
    assert slots.narrow.length == 42 and torch.equal(read_all(slots.key_parts(), torch.float32), key)


def test_first_layer_through_a_model() -> None:
    """The model's own queries decide: attention of one step by hand, from the record's keys and values."""
    ids, seen = random_ids(1, PROMPT + 1), []
    method = Method("think", Full(), Think(0.5, 16))
    record = prefill(EXACT, ids[:, :PROMPT], [method])
    layer = record.layers[0]
    assert layer.observed[QueryPower()].shape == (1, KV_HEADS * GROUP, D)
    cache = build_cache(EXACT, method, record, 1)
    assert isinstance(cache, KVCache) and cache.kernel_name == "reference"
    attend = cache.layers[0].attend
    cache.layers[0].attend = lambda query, scoring: seen.append((query, attend(query, scoring))) or seen[-1][1]  # type: ignore
    step(EXACT, ids[:, PROMPT:], cache)
    query, output = seen[0]
    new_key, new_value = cache.layers[0].slots.keys.residual, cache.layers[0].slots.values.rows
    power = layer.observed[QueryPower()].view(KV_HEADS, GROUP, D).mean(1)
    key = layer.key.clone()
    for h in range(KV_HEADS):
        scores = power[h] * (key[0, h] ** 2).mean(0)
        drop = scores.argsort()[: D // 2]
        key[0, h, : PROMPT - 16, drop] = 0
    key = torch.cat([key, new_key[:, :, PROMPT % new_key.shape[2], None]], 2)
    p = attention_matrix(query, key, torch.ones(1, PROMPT + 1, dtype=torch.bool), D**-0.5)
    torch.testing.assert_close(output, attention_output(p, new_value), atol=1e-9, rtol=0)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.25])
@pytest.mark.parametrize("residual", [8, 200])
def test_bytes_by_hand_follow_the_share(share: float, residual: int) -> None:
    shape = SlotShape(2, 3, 64, 96, 100, 2, torch.bfloat16, CPU)
    store = Think(share, residual)
    held = held_bytes(store.allocate(shape).buffers(100)).held
    ring, kept = min(residual + 2, 100), round(64 * share)
    pruned = 2 * max(0, 100 - residual) * kept + 2 * ring * 64 + 8 * kept
    assert held == 2 * 3 * ((pruned if share < 1 else 2 * 100 * 64) + 2 * 100 * 96) == store.planned_bytes(shape)


def test_the_compiled_kernel_says_why_it_does_not_read_them() -> None:
    slots = Think(0.5, 8).allocate(SlotShape(1, 1, D, D, 50, 1, torch.float32, CPU))
    slots.fill(torch.zeros(1, 1, 50, D), torch.zeros(1, 1, 50, D))
    refusal = choose(CPU, torch.float32, "cpu").refusal(torch.zeros(1, 1, 1, D), slots.key_parts(), slots.value_parts())
    assert refusal == "the compiled kernel does not read rows that hold some of their channels"


def test_settings_that_cannot_be_held() -> None:
    for share in (0, 1.5, True, "half"):
        with pytest.raises(UserError, match=f"channels={share} for think; type a share above 0"):
            Think(share)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="residual=0 for think; type a whole number"):
        Think(0.5, 0)
    with pytest.raises(UserError, match="evicts single tokens during decode, and Think can only append"):
        Method("h2o", H2O(budget=30), Think()).check_combination()
    with pytest.raises(UserError, match=r"the record lacks .*QueryPower.* type prefill\(model, ids, \[method\]\)"):
        build_cache(MODEL, Method("full", Full(), Think()), prefill(MODEL, random_ids(1, 40)))
