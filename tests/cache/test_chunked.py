"""Prompts read in chunks: who stays, against loops and masks; what is held; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import continuation, step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.kernels import prefill as kernel_blocks
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.per_token import PerToken
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.random import Random
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from tests.shared.families import exact_llama, random_ids, tiny

pytestmark = pytest.mark.engine

HQ, HKV = 4, 2
DENSE = DenseStore()


def chunked(rule: KeepRule, chunk: int | None, store: Store = DENSE) -> Method:
    return Method("m", rule, store, prefill_chunk=chunk)


def logits_of(model: Any, method: Method, ids: Tensor, following: Tensor) -> tuple[Tensor, KVCache]:
    """The prompt's last prediction and those after each token that follows: [n + 1, B, V]."""
    cache = build_cache(model, method, ids, max_new_tokens=following.shape[1])
    found = [cache.last_logits]
    found += [step(model, following[:, [t]], cache)[:, -1] for t in range(following.shape[1])]
    assert isinstance(cache, KVCache)
    return torch.stack(found), cache


RULES: list[tuple[KeepRule, Store]] = [
    (Full(), DENSE),
    (Full(), PerToken(group_size=16)),
    (Full(), Kivi(group_size=8, residual_length=16)),
    (H2O(budget=12), DENSE),
    (H2O(budget=0.3), PerToken(group_size=16, rotate=True)),
    (Tova(budget=9), DENSE),
    (KNorm(budget=9, skip_layers=1), DENSE),
    (Random(budget=20), DENSE),
    (StreamingLLM(budget=13), DENSE),
    (SnapKV(budget=14, window=6), DENSE),
    (Pyramid(budget=14, window=6, decode="evict"), DENSE),
    (ChunkKV(budget=14, window=6, chunk=3), DENSE),
]


@pytest.mark.parametrize(("rule", "store"), RULES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("chunk", [50, 77])
def test_a_chunk_that_holds_the_prompt_changes_no_bit(rule: KeepRule, store: Store, chunk: int) -> None:
    model, ids, following = tiny("llama"), random_ids(2, 50), random_ids(2, 6, seed=1)
    whole, before = logits_of(model, chunked(rule, None, store), ids, following)
    same, after = logits_of(model, chunked(rule, chunk, store), ids, following)
    assert torch.equal(whole, same)
    assert held_bytes(before.buffers()).held == held_bytes(after.buffers()).held


@pytest.mark.parametrize(("rule", "store"), RULES, ids=lambda one: type(one).__name__)
def test_a_chunked_cache_is_as_large_as_one_built_at_once(rule: KeepRule, store: Store) -> None:
    model, ids, following = tiny("llama"), random_ids(2, 50), random_ids(2, 6, seed=1)
    _, whole = logits_of(model, chunked(rule, None, store), ids, following)
    _, parts = logits_of(model, chunked(rule, 8, store), ids, following)
    assert held_bytes(parts.buffers()).held == held_bytes(whole.buffers()).held
    assert parts.kept_tokens == whole.kept_tokens
    assert parts.seen == whole.seen == 56


@pytest.mark.parametrize("chunk", [1, 7, 16, 49])
def test_the_full_cache_reads_the_same_text_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_blocks, "BLOCK_BYTES", 1)  # several blocks of query rows to a chunk
    model, ids, following = exact_llama(HQ, HKV), random_ids(2, 50), random_ids(2, 4, seed=1)
    whole, _ = logits_of(model, chunked(Full(), None), ids, following)
    parts, cache = logits_of(model, chunked(Full(), chunk), ids, following)
    assert (whole - parts).abs().max() < 1e-12
    assert not cache.compressed_before_last_logits


@pytest.mark.parametrize("rule", [H2O(budget=60), StreamingLLM(budget=60), SnapKV(budget=60), Tova(budget=60)])
def test_a_budget_for_every_token_is_the_full_cache(rule: KeepRule) -> None:
    model, ids, following = exact_llama(HQ, HKV), random_ids(2, 50), random_ids(2, 4, seed=1)
    whole, _ = logits_of(model, chunked(Full(), None), ids, following)
    assert (whole - logits_of(model, chunked(rule, 9), ids, following)[0]).abs().max() < 1e-12


@dataclass
class Head:
    """One layer's KV head in the slow model: what it holds, oldest first, and the scores of it."""

    kept: list[int]
    scores: dict[int, float]


Choose = Callable[[Head, list[int], Tensor, int], list[int]]
"""(head, candidates, probabilities [q, candidates] summed over query heads, budget) -> the candidates that stay."""


def by_h2o(head: Head, candidates: list[int], p: Tensor, budget: int) -> list[int]:
    for column, token in enumerate(candidates):
        head.scores[token] = head.scores.get(token, 0.0) + float(p[:, column].sum())
    if len(candidates) <= budget:
        return candidates
    recent = budget // 2
    others = sorted(candidates[:-recent], key=lambda token: (head.scores[token], token))
    return sorted(others[len(others) - (budget - recent) :] + candidates[-recent:])


def by_tova(head: Head, candidates: list[int], p: Tensor, budget: int) -> list[int]:
    if len(candidates) <= budget:
        return candidates
    newest = dict(zip(candidates, p[-1].tolist(), strict=True))
    others = sorted(candidates[:-1], key=lambda token: (newest[token], token))
    return sorted(others[len(others) - (budget - 1) :] + candidates[-1:])


def by_snapkv(head: Head, candidates: list[int], p: Tensor, budget: int, window: int = 6) -> list[int]:
    if len(candidates) <= budget:
        return candidates
    seen = p[-window:].sum(0).tolist()
    before = len(candidates) - window
    pooled = [max(seen[i] for i in range(before) if abs(i - j) <= 3) for j in range(before)]
    order = sorted(range(before), key=lambda j: (pooled[j], candidates[j]))
    return sorted([candidates[j] for j in order[len(order) - (budget - window) :]] + candidates[before:])


@dataclass
class SlowLayer:
    """One layer that reads chunks: its heads, and the key and value [Hkv, D] of every token it was ever given."""

    module: Any
    heads: list[Head]
    tokens: dict[int, tuple[Tensor, Tensor]]

    def read(self, x: Tensor, cos: Tensor, sin: Tensor, new: list[int], choose: Choose, budget: int) -> Tensor:
        """Attention of the chunk x [q, hidden] by loops over heads, then each head's choice."""
        size, group = self.module.head_dim, HQ // HKV
        query, key, value = (
            project(x).view(len(new), -1, size)
            for project in (self.module.q_proj, self.module.k_proj, self.module.v_proj)
        )
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        self.tokens |= {token: (key[t], value[t]) for t, token in enumerate(new)}
        output, seen = torch.zeros(len(new), HQ, size, dtype=x.dtype), []
        for kv, head in enumerate(self.heads):
            candidates = head.kept + new
            keys, values = (torch.stack([self.tokens[j][side][kv] for j in candidates]) for side in (0, 1))
            later = torch.tensor([[j > token for j in candidates] for token in new])
            seen.append(torch.zeros(len(new), len(candidates), dtype=x.dtype))
            for q in range(kv * group, (kv + 1) * group):
                p = (query[:, q] @ keys.T * size**-0.5).masked_fill(later, -torch.inf).softmax(-1)
                seen[-1] += p
                output[:, q] = p @ values
        for head, mine in zip(self.heads, seen, strict=True):
            head.kept = choose(head, head.kept + new, torch.stack(seen).sum(0) if choose is by_tova else mine, budget)
        return self.module.o_proj(output.flatten(1))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def slow_chunks(model: Any, ids: Tensor, chunk: int, budget: int, choose: Choose) -> list[list[list[int]]]:
    """By layer and head, the tokens of a prompt [T] that stay. Tokens never move; evicted ones are left out of sums."""
    layers = [SlowLayer(one.self_attn, [Head([], {}) for _ in range(HKV)], {}) for one in model.model.layers]
    for start in range(0, len(ids), chunk):
        new = list(range(start, min(start + chunk, len(ids))))
        x = model.model.embed_tokens(ids[new])
        cos, sin = (each[0] for each in model.model.rotary_emb(x, torch.tensor([new])))
        for slow, layer in zip(layers, model.model.layers, strict=True):
            x = x + slow.read(layer.input_layernorm(x), cos, sin, new, choose, budget)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return [[head.kept for head in slow.heads] for slow in layers]


@pytest.mark.parametrize(
    ("rule", "choose"),
    [(H2O(budget=11), by_h2o), (Tova(budget=11), by_tova), (SnapKV(budget=11, window=6), by_snapkv)],
    ids=["h2o", "tova", "snapkv"],
)
@pytest.mark.parametrize("chunk", [8, 13])
@torch.no_grad()
def test_kept_tokens_equal_the_slow_model_s(rule: KeepRule, choose: Choose, chunk: int) -> None:
    model, ids = exact_llama(HQ, HKV), random_ids(2, 39)
    cache = build_cache(model, chunked(rule, chunk), ids, max_new_tokens=1)
    for row in range(2):
        slow = slow_chunks(model, ids[row], chunk, 11, choose)
        for depth, positions in cache.kept_positions().items():
            assert positions[row].tolist() == slow[depth]


def test_streaming_keeps_sinks_and_the_newest_tokens() -> None:
    model, ids = exact_llama(HQ, HKV), random_ids(2, 50)
    cache = build_cache(model, chunked(StreamingLLM(budget=13), 9), ids, max_new_tokens=1)
    assert cache.kept_positions()[0][1, 0].tolist() == [0, 1, 2, 3, *range(41, 50)]


@pytest.mark.parametrize("variant", ["in_cache", "absolute"])
def test_streaming_reads_chunks_as_its_decode_reads_tokens(variant: str) -> None:
    """Chunks of one token through the prompt are decode steps from a prompt of one token."""
    model, ids, following = exact_llama(HQ, HKV), random_ids(1, 30), random_ids(1, 3, seed=1)
    rule = StreamingLLM(budget=9, variant=variant)
    parts, _ = logits_of(model, chunked(rule, 1), ids, following)
    stepped = build_cache(model, chunked(rule, None), ids[:, :1], max_new_tokens=40)
    last = [step(model, ids[:, [t]], stepped)[:, -1] for t in range(1, 30)][-1]
    after = [step(model, following[:, [t]], stepped)[:, -1] for t in range(3)]
    assert (parts - torch.stack([last, *after])).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "gpt-oss", "gpt2", "opt", "phi3"])
def test_windows_softcaps_and_sinks_are_honoured(family: str) -> None:
    """A full cache in chunks equals one in one piece where layers have windows, soft caps or attention sinks."""
    model, ids, following = tiny(family), random_ids(2, 50), random_ids(2, 4, seed=1)
    whole, _ = logits_of(model, chunked(Full(), None), ids, following)
    parts, _ = logits_of(model, chunked(Full(), 7), ids, following)
    assert (whole - parts).abs().max() < 1e-4 * whole.abs().max()


@pytest.mark.parametrize(
    "store", [PerToken(group_size=16), PerToken(group_size=16, rotate=True), Kivi(group_size=8, residual_length=16)]
)
def test_a_chunk_attends_to_itself_before_it_is_quantised(store: Store) -> None:
    """In a prompt of one chunk and a token, the chunk's own codes are read by the last token alone."""
    model, ids = exact_llama(HQ, HKV), random_ids(1, 33)
    cache = build_cache(model, chunked(Full(), 32, store), ids, max_new_tokens=1)
    stepped = build_cache(model, chunked(Full(), None, store), ids[:, :32], max_new_tokens=2)
    keys = [torch.cat([part.read(torch.float64) for part in layer.slots.key_parts()], 2) for layer in cache.layers]
    twins = [torch.cat([part.read(torch.float64) for part in layer.slots.key_parts()], 2) for layer in stepped.layers]
    for mine, theirs in zip(keys, twins, strict=True):
        assert torch.equal(mine[:, :, :32], theirs)


def test_kivi_s_residual_rule_holds_after_each_chunk() -> None:
    """R = 16 and 50 tokens: keys [48 | 2], values [34 | 16], whatever the chunks."""
    model, ids = exact_llama(HQ, HKV), random_ids(2, 50)
    for chunk in (7, 16, 40):
        cache = build_cache(model, chunked(Full(), chunk, Kivi(group_size=8, residual_length=16)), ids)
        slots = cache.layers[0].slots
        assert (slots.keys.groups.length, slots.keys.length) == (48, 50)
        assert (slots.values.groups.length, slots.values.length) == (34, 50)


def test_memory_follows_budget_and_chunk_and_not_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of keys and values that attention is given, the largest of all forwards, at four times the prompt."""
    from kvbench.cache import chunked as module

    largest: list[int] = []
    attend = module.attend_chunk

    def watched(query: Tensor, key: Tensor, value: Tensor, first: int, held: Any, *rest: Any) -> Any:
        rows = [part.rows for part in (*held.keys, *held.values)] + [key, value]
        largest[-1] = max(largest[-1], sum(x.nbytes for x in rows))
        return attend(query, key, value, first, held, *rest)

    monkeypatch.setattr(module, "attend_chunk", watched)
    for tokens in (100, 200, 400):
        largest.append(0)
        build_cache(exact_llama(HQ, HKV), chunked(H2O(budget=24), 16), random_ids(1, tokens), max_new_tokens=1)
    assert largest[0] == largest[1] == largest[2]


def test_the_first_prediction_counts_as_engaged_only_after_an_eviction() -> None:
    model, ids = exact_llama(HQ, HKV), random_ids(1, 30)
    for chunk, engaged in ((None, False), (30, False), (10, True)):
        cache = build_cache(model, chunked(H2O(budget=12), chunk), ids, max_new_tokens=4)
        assert continuation(model, None, cache, 2).engaged == [engaged, True]


def test_a_record_serves_only_its_ids() -> None:
    model, ids, method = exact_llama(HQ, HKV), random_ids(2, 50), chunked(H2O(budget=12), 9)
    found = build_cache(model, method, prefill(model, ids, []), max_new_tokens=1)
    assert torch.equal(found.last_logits, build_cache(model, method, ids, max_new_tokens=1).last_logits)
    assert found.prefill_ms is not None and found.prefill_ms > 0 and found.compress_ms > 0


@pytest.mark.parametrize(
    ("entry", "knobs", "reason"),
    [
        ("kvzip", {"budget": 64}, "after the whole prompt"),
        ("critical", {"budget": 64}, "after the whole prompt"),
        ("hindsight", {"budget": 64}, "after the whole prompt"),
        ("adakv", {"budget": 64, "inner": "snapkv"}, "divides the budget between heads"),
        ("expected_attention", {"budget": 64}, "scores the whole prompt at once"),
        ("keydiff", {"budget": 64, "decode": "evict"}, "scores the whole prompt at once"),
        ("lagkv", {"budget": 300}, "scores the whole prompt at once"),
        ("r_kv", {"budget": 64}, "scores the whole prompt at once"),
        ("cam", {"budget": 64}, "merges"),
        ("d2o", {"budget": 64}, "merges"),
        ("recompute", {}, "no slots"),
        ("full+fp8", {}, "takes its scales from the whole prompt"),
        ("snapkv+kivi4", {"budget": 64}, "can only append"),
    ],
)
def test_what_needs_the_whole_prompt_says_so(entry: str, knobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        kvbench.load_method(entry, prefill={"chunk": 32}, **knobs)
    assert "leave prefill.chunk out" in str(error.value)


@pytest.mark.parametrize("chunk", [0, -3, 0.5, "many", True])
def test_a_chunk_is_a_number_of_tokens(chunk: object) -> None:
    with pytest.raises(UserError, match=r"type prefill\.chunk=512"):
        kvbench.load_method("h2o", budget=64, prefill={"chunk": chunk})


def test_a_model_with_states_is_refused() -> None:
    model = tiny("lfm2")
    with pytest.raises(UserError, match="keep a state"):
        build_cache(model, replace(chunked(Full(), 8)), random_ids(1, 20))
