"""KVzip against an independent replay through transformers' own eager attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.calibrate import calibrate
from kvbench.cache.output_norms import OutputNorms
from kvbench.cache.replay import ReplayAttention
from kvbench.cache.store import DenseStore
from kvbench.methods.kvzip import INSTRUCTION, KVzip
from tests.shared.models import random_llama
from tests.shared.scoring import MODEL, TEXT
from tests.shared.text import character_tokenizer, loaded

PROMPT, N_SINK = 24, 4
INSTRUCTIONS = (5, 7, 11)


def eager_replay(ids: Tensor, instruction: tuple[int, ...], chunk: int) -> Tensor:
    """Largest probability of each prompt token in the replay of its chunk: [layers, Hkv, G, T]."""
    eager = random_llama(4, 2, 16, dtype=torch.float32)
    eager.set_attn_implementation("eager")
    parts = []
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        fed = torch.cat([ids, torch.tensor(instruction, dtype=torch.long), ids[start:stop]])
        attention = torch.stack(eager(input_ids=fed[None], output_attentions=True).attentions)[:, 0, :, len(ids) :]
        counted = [j for j in range(len(fed)) if j >= len(ids) or start <= j < stop or j < N_SINK]
        share = attention[..., start:stop] / attention[..., counted].sum(-1, keepdim=True)
        parts.append(share.amax(-2))
    return torch.cat(parts, dim=-1).unflatten(1, (2, 2))


@pytest.mark.parametrize("chunk", [2048, 10, 7])
def test_scores_are_those_of_an_independent_replay(chunk: int) -> None:
    for start in (0, 500):
        ids = TEXT[start : start + PROMPT]
        rule = KVzip(8, chunk=chunk, instruction=INSTRUCTIONS)
        record = prefill(MODEL, ids[None], [rule])
        expected = eager_replay(ids, INSTRUCTIONS, chunk)
        for layer in record.layers:
            found = layer.observed[ReplayAttention(INSTRUCTIONS, chunk)][0]
            assert torch.allclose(found, expected[layer.index], atol=1e-5)


@pytest.mark.parametrize("budget", [3, 8, 20])
def test_the_best_pairs_of_all_heads_and_layers_stay(budget: int) -> None:
    ids = torch.stack([TEXT[:PROMPT], TEXT[700 : 700 + PROMPT]])
    rule = KVzip(budget, instruction=INSTRUCTIONS)
    cache = build_cache(MODEL, Method("kvzip", rule, DenseStore()), ids)
    held = cache.kept_positions()
    for b in range(2):
        scores = eager_replay(ids[b], INSTRUCTIONS, 2048).amax(2)  # [layers, Hkv, T]
        pairs = [(float("inf") if at[2] == PROMPT - 1 else float(scores[at]), at) for at in ordered(scores)]
        best = {at for _, at in sorted(pairs)[len(pairs) - 2 * 2 * budget :]}
        mine = {
            (layer, head, int(t))
            for layer, rows in held.items()
            for head in range(2)
            for t in rows[b, head].tolist()
            if t >= 0
        }
        assert len(mine) == 4 * budget
        assert len(mine & best) >= 0.99 * len(best)
    assert cache.kept_tokens == budget


def ordered(scores: Tensor) -> list[tuple[int, int, int]]:
    return [(i, h, t) for i in range(scores.shape[0]) for h in range(scores.shape[1]) for t in range(scores.shape[2])]


def test_uniform_gives_every_head_the_budget_and_plus_weighs_by_norms() -> None:
    ids = TEXT[None, :PROMPT]
    uniform = KVzip(8, share="uniform", instruction=INSTRUCTIONS)
    held = build_cache(MODEL, Method("kvzip", uniform, DenseStore()), ids).kept_positions()
    scores = eager_replay(ids[0], INSTRUCTIONS, 2048).amax(2)
    for layer, rows in held.items():
        for head in range(2):
            best = scores[layer, head, : PROMPT - 1].topk(7).indices.tolist()
            assert rows[0, head].tolist() == sorted([*best, PROMPT - 1])
    plus = KVzip(8, share="plus", instruction=INSTRUCTIONS)
    record = prefill(MODEL, ids, [plus])
    for layer in record.layers:
        weighted = eager_replay(ids[0], INSTRUCTIONS, 2048)[layer.index] * layer.observed[OutputNorms(2)][0]
        assert torch.allclose(plus.initial_scores(layer)[0], weighted.amax(1), atol=1e-4)


def test_the_instruction_is_the_models_tokens() -> None:
    tokenizer = character_tokenizer()
    method = calibrate(Method("kvzip", KVzip(8), DenseStore()), loaded(MODEL, tokenizer))
    assert isinstance(method.rule, KVzip)
    assert list(method.rule.instruction) == tokenizer(INSTRUCTION, add_special_tokens=False).input_ids
    bare = calibrate(Method("kvzip", KVzip(8), DenseStore()), loaded(MODEL))
    assert isinstance(bare.rule, KVzip) and bare.rule.instruction == ()


def test_replay_time_is_a_time_of_its_own() -> None:
    rule = KVzip(8, instruction=INSTRUCTIONS)
    record = prefill(MODEL, TEXT[None, :PROMPT], [rule])
    assert record.observe_ms[ReplayAttention(INSTRUCTIONS)] > 0
