"""Expected Attention: moments against the queries that the model rotates, scores against a loop over tokens."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.build import Method, build_cache, check_model, prefill
from kvbench.cache.observe import QueryMoments
from kvbench.cache.rule import keep_best
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.kernels import prefill as kernels
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import ALTERNATING, COMMON, exact_llama, random_ids, tiny

pytestmark = pytest.mark.engine

ROTATING = ["llama", "llama-llama3", "llama-yarn", "qwen3", "phi3", "gpt-neox", "olmo2", "gemma3", "gpt-oss"]


def modules_of(model: PreTrainedModel) -> tuple[torch.nn.Module, object]:
    """The rotary module, and the modelling file whose apply_rotary_pos_emb rotates."""
    embed = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    attention = next(module for name, module in model.named_modules() if name.endswith(("self_attn", "attention")))
    return embed, sys.modules[type(attention).__module__]


def recorded(model: PreTrainedModel, ids: Tensor, rule: ExpectedAttention, monkeypatch: pytest.MonkeyPatch):
    """The record of a prefill, and the queries [B, Hq, T, D] of each layer as the model was about to rotate them."""
    _, modelling = modules_of(model)
    original, raw = modelling.apply_rotary_pos_emb, []

    def watched(query, key, *arguments, **named):
        raw.append(query.double())
        return original(query, key, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(modelling, "apply_rotary_pos_emb", watched)
        prefill(model, ids)  # asks for no observation, so that only the model rotates
    return prefill(model, ids, [rule]), raw


def scaling_of(model: PreTrainedModel, layer: int) -> float:
    """The factor that yarn puts on cos and sin."""
    embed, _ = modules_of(model)
    types = getattr(model.config, "layer_types", None) or []
    own = f"{types[layer]}_attention_scaling" if types else ""
    return float(getattr(embed, own, getattr(embed, "attention_scaling", 1.0)))


def mean_rotation(model: PreTrainedModel, layer: int, first: int, count: int, dim: int) -> Tensor:
    """The mean of the matrices R with R q = the rotated q, over positions, one position at a time."""
    embed, modelling = modules_of(model)
    types = getattr(model.config, "layer_types", None) or []
    extra = (types[layer],) if "gemma3" in type(model).__name__.lower() else ()
    total = torch.zeros(dim, dim, dtype=torch.float64)
    rows = torch.eye(dim).view(1, 1, dim, dim)
    for position in range(first, first + count):
        cos, sin = embed(torch.zeros(1), torch.tensor([[position]]), *extra)
        turned = modelling.apply_rotary_pos_emb(rows.to(cos.dtype), rows.to(cos.dtype), cos, sin)[0]
        total += turned[0, 0].double().T / scaling_of(model, layer)
    return total / count


def slow_scores(
    query: Tensor, key: Tensor, value: Tensor, rotation: Tensor, scale: float, n_sink: int, sink_logits: Tensor | None
) -> list[list[list[float]]]:
    """The paper's score, token by token: query [B, Hq, T, D] un-rotated, key [B, Hkv, T, D] rotated."""
    (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
    group = heads // kv_heads
    result = []
    for b in range(batch):
        rows = []
        for kv in range(kv_heads):
            mean_weight = [0.0] * length
            for head in range(kv * group, (kv + 1) * group):
                samples = [query[b, head, t] for t in range(n_sink, length)]
                mu = sum(samples) / len(samples)
                sigma = sum(torch.outer(q - mu, q - mu) for q in samples) / len(samples)
                mu, sigma = rotation @ mu, rotation @ sigma @ rotation.T
                exponents = {
                    t: float(scale * key[b, kv, t] @ mu + scale**2 / 2 * key[b, kv, t] @ sigma @ key[b, kv, t])
                    for t in range(n_sink, length)
                }
                learned = [] if sink_logits is None else [float(sink_logits[head])]
                top = max([*exponents.values(), *learned])
                total = sum(math.exp(e - top) for e in [*exponents.values(), *learned])
                for t, e in exponents.items():
                    mean_weight[t] += math.exp(e - top) / total / group
            rows.append([w * float(value[b, kv, t].norm()) for t, w in enumerate(mean_weight)])
        result.append(rows)
    return result


@pytest.mark.parametrize("family", ROTATING)
def test_moments_are_those_of_the_queries_that_the_model_rotates(family, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_BYTES", 1)  # blocks of 16 rows
    model, rule = tiny(family), ExpectedAttention(budget=20, n_sink=3)
    record, raw = recorded(model, random_ids(2, 53), rule, monkeypatch)
    checked = 0
    for layer, query in zip(record.layers, raw, strict=True):
        if layer.scoring.window is not None:
            assert not layer.observed
            continue
        samples = query[:, :, 3:] * scaling_of(model, layer.index)
        moments = layer.observed[QueryMoments(3)].double()
        torch.testing.assert_close(moments[:, :, 0], samples.mean(2), atol=1e-5, rtol=1e-5)
        for b in range(2):
            for head in range(samples.shape[1]):
                covariance = torch.cov(samples[b, head].T, correction=0)
                torch.testing.assert_close(moments[b, head, 1:], covariance, atol=2e-5, rtol=1e-4)
        checked += 1
    assert checked


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "phi3", "gpt-neox", "gemma3", "gpt-oss"])
def test_scores_are_the_paper_s(family, monkeypatch):
    model, rule = tiny(family), ExpectedAttention(budget=20, future=40)
    record, raw = recorded(model, random_ids(1, 30), rule, monkeypatch)
    layer = next(layer for layer in record.layers if layer.scoring.window is None)
    query = raw[layer.index] * scaling_of(model, layer.index)
    rotation = mean_rotation(model, layer.index, 30, 40, query.shape[-1])
    expected = torch.tensor(
        slow_scores(
            query,
            layer.key.double(),
            layer.value.double(),
            rotation,
            layer.scoring.scaling,
            4,
            layer.scoring.sink_logits,
        )
    )
    torch.testing.assert_close(rule.initial_scores(layer), expected.float(), atol=1e-5, rtol=1e-3)


def test_sinks_the_newest_and_the_best_stay(monkeypatch):
    model, ids, rule = exact_llama(6, 2), random_ids(2, 40), ExpectedAttention(budget=17)
    record, raw = recorded(model, ids, rule, monkeypatch)
    cache = build_cache(model, Method("m", rule, DenseStore()), record)
    rotation = mean_rotation(model, 0, 40, 512, 16)
    for layer, query in zip(record.layers, raw, strict=True):
        scores = slow_scores(query, layer.key, layer.value, rotation, layer.scoring.scaling, 4, None)
        for b in range(2):
            for kv in range(2):
                priority = [math.inf if t < 4 or t == 39 else scores[b][kv][t] for t in range(40)]
                stay = sorted(sorted(range(40), key=lambda t, priority=priority: (priority[t], t))[-17:])
                assert cache.layers[layer.index].kept_positions()[b, kv].tolist() == stay


def slow_anew(raw: Tensor, key: Tensor, value: Tensor, rotation: Tensor, scale: float, n_sink: int) -> list[float]:
    """Scores of the tokens held by one KV head, oldest first: its heads' newest queries raw [heads, w, D] un-rotated,
    key [n, D] rotated, value [n, Dv]."""
    total = [0.0] * len(key)
    for samples in raw:
        mu = sum(samples) / len(samples)
        sigma = sum(torch.outer(q - mu, q - mu) for q in samples) / len(samples)
        mu, sigma = rotation @ mu, rotation @ sigma @ rotation.T
        weights = [math.exp(float(scale * k @ mu + scale**2 / 2 * k @ sigma @ k)) for k in key[n_sink:]]
        for i, weight in enumerate(weights):
            total[n_sink + i] += weight / sum(weights) / len(raw) * float(value[n_sink + i].norm())
    return total


@pytest.mark.parametrize(("buffer", "n_sink"), [(1, 4), (5, 4), (8, 0)])
def test_evicting_scores_all_tokens_anew_by_the_newest_queries(buffer, n_sink, monkeypatch):
    """Of the first layer, whose queries and keys do not depend on what was evicted."""
    model, ids, prompt = exact_llama(6, 2, layers=1), random_ids(2, 60), 40
    rule = ExpectedAttention(budget=17, n_sink=n_sink, future=30, buffer=buffer, decode="evict")
    record, raw = recorded(model, ids, rule, monkeypatch)
    layer, query = record.layers[0], raw[0]
    cache = build_cache(model, Method("m", rule, DenseStore()), ids[:, :prompt], max_new_tokens=20)
    held = cache.layers[0].kept_positions().tolist()
    evictions = 0
    for t in range(prompt, 60):
        cache.step(model, ids[:, t : t + 1])
        for b in range(2):
            for kv in range(2):
                now = held[b][kv] = [*held[b][kv], t]
                if len(now) < 17 + buffer:
                    continue
                rotation = mean_rotation(model, 0, t + 1, 30, 16)
                heads = query[b, 3 * kv : 3 * kv + 3, t + 1 - buffer : t + 1]
                scores = slow_anew(heads, layer.key[b, kv, now], layer.value[b, kv, now], rotation, 0.25, n_sink)
                scores[:n_sink], scores[-1] = [math.inf] * n_sink, math.inf
                stay = sorted(range(len(now)), key=lambda i, scores=scores: (scores[i], i))[-17:]
                held[b][kv] = [now[i] for i in sorted(stay)]
                evictions += 1
        assert cache.layers[0].kept_positions().tolist() == held
    assert evictions == 4 * (20 // buffer)


def test_appending_keeps_no_queries():
    model, ids = exact_llama(2, 2), random_ids(1, 30)
    for decode, held in (("append", 0), ("evict", 2)):
        rule = ExpectedAttention(budget=9, buffer=4, decode=decode)
        cache = build_cache(model, Method("m", rule, DenseStore()), ids, max_new_tokens=4)
        assert [buffer.part for buffer in cache.buffers()].count("queries") == held


def test_ties_and_prompts_shorter_than_the_sinks():
    model, ids = exact_llama(2, 2), random_ids(1, 3)
    cache = build_cache(model, Method("m", ExpectedAttention(budget=9), DenseStore()), ids)
    assert cache.layers[0].kept_positions()[0, 0].tolist() == [0, 1, 2]
    rule = ExpectedAttention(budget=6, n_sink=2)
    position = torch.arange(12).view(1, 1, -1)
    priority = rule.priority(torch.full((1, 1, 12), 0.25), position, 11, 6, 0)
    assert keep_best(priority, 6)[0, 0].tolist() == [0, 1, 8, 9, 10, 11]


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama-dynamic", "phi3-longrope", "gemma2"])
def test_what_has_no_rotation_to_take_off_is_refused_by_name(family):
    model, rule = tiny(family), ExpectedAttention(budget=16)
    for attempt in (lambda: check_model(model, rule), lambda: prefill(model, random_ids(1, 20), [rule])):
        with pytest.raises(UserError, match="another method than expected_attention") as caught:
            attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "family, own",
    [("SmolLM3", {"no_rope_layers": [1, 0]}), ("Cohere2", {"sliding_window": 16, "layer_types": ALTERNATING})],
)
def test_families_that_rotate_in_some_layers_only_are_refused(family, own):
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**COMMON, **own))
    refused = (ExpectedAttention(budget=16), "another method"), (StreamingLLM(budget=16), "variant=absolute")
    for rule, advice in refused:
        with pytest.raises(UserError, match=f"some of its layers only.*{advice}"):
            check_model(model, rule)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ExpectedAttention(budget=4), "budget=5"),
        (lambda: ExpectedAttention(budget=9, n_sink=-1), "sinks=4"),
        (lambda: ExpectedAttention(budget=9, future=0), "512"),
        (lambda: ExpectedAttention(budget=9, buffer=0, decode="evict"), "buffer=512"),
    ],
)
def test_unusable_settings(make, words):
    with pytest.raises(UserError, match=words):
        make()
