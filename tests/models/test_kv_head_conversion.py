"""model.kv_heads: repeated heads change no logit, pooled ones are the means of their group, and the rows say which."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.decode import step
from kvbench.cache.store import DenseStore
from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.models.kv_head_conversion import convert_kv_heads
from kvbench.models.load import describe, load_model, model_spec
from kvbench.models.shape import ModelShape, shape_of, with_kv_heads
from kvbench.results.loading import load
from tests.shared.families import random_ids, tiny
from tests.shared.models import TINY, random_llama

FAMILIES = ["llama", "mistral", "qwen2", "qwen2-window", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "gpt-oss"]
"""Between them: biases (qwen2, gpt-oss), norms a head (qwen3, gemma3) and over all heads (olmo2), fused rows (phi3),
windows. Each has 4 query heads and 2 KV heads."""


def resized(model: PreTrainedModel, heads: int) -> tuple[PreTrainedModel, ModelShape]:
    """A copy of the model with that many KV heads."""
    model = copy.deepcopy(model)
    shape = with_kv_heads(shape_of(model.config), heads, model.config, "it")
    convert_kv_heads(model, shape)
    return model, shape


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """As transformers runs it, without a cache."""
    return model(input_ids=ids, use_cache=False).logits


def cached(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The engine's last logits after a prompt and three steps, and the bytes of its cache."""
    cache = build_cache(model, Method("full", Full(), DenseStore()), ids[:, :-3], 3)
    for t in range(ids.shape[1] - 3, ids.shape[1]):
        last = step(model, ids[:, t : t + 1], cache)[:, -1]
    return last, held_bytes(cache.buffers()).parts["dense"]


@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_heads_give_the_same_logits_from_twice_the_cache(family: str) -> None:
    model, ids = tiny(family), random_ids(2, 24)
    more, shape = resized(model, 4)
    assert (shape.arch, shape.kv_heads, shape.converted_from) == ("mha", 4, 2)
    assert (more.config.num_key_value_heads, model.config.num_key_value_heads) == (4, 2)
    tolerance = 1e-5 * float(logits(model, ids).abs().max())
    torch.testing.assert_close(logits(more, ids), logits(model, ids), atol=tolerance, rtol=0)
    (before, small), (after, large) = cached(model, ids), cached(more, ids)
    torch.testing.assert_close(after, before, atol=tolerance, rtol=0)
    assert large == 2 * small


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_one_kv_head_is_repeated_whatever_its_norm_spans(family: str) -> None:
    """A norm a head and a norm over all heads are of one size where there is one KV head."""
    model, ids = tiny(family, num_key_value_heads=1), random_ids(2, 24)
    more, shape = resized(model, 4)
    assert (shape.arch, shape.converted_from) == ("mha", 1)
    tolerance = 1e-5 * float(logits(model, ids).abs().max())
    torch.testing.assert_close(logits(more, ids), logits(model, ids), atol=tolerance, rtol=0)
    assert cached(more, ids)[1] == 4 * cached(model, ids)[1]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("doge", "it has other weights of a size that follows the KV heads"),
        ("gpt_neox", "none of its layers says how many query heads share a KV head"),
    ],
)
def test_families_that_cannot_be_converted_say_so(kind: str, why: str) -> None:
    config = AutoConfig.for_model(kind, **{key: value for key, value in TINY.items() if key != "model_type"})
    with pytest.raises(UserError, match=f"model.kv_heads=4 cannot be had from .*: {why}; leave"):
        resized(AutoModelForCausalLM.from_config(config).eval(), 4)


def test_repeated_heads_that_change_the_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a family whose query heads read KV heads in another order than Llama's."""
    monkeypatch.setattr(
        "kvbench.models.kv_head_conversion.resized_rows", lambda rows, resize, first: rows.repeat(2, 1).flip(0)
    )
    with pytest.raises(UserError, match="repeating its KV heads does not give the same logits"):
        resized(random_llama(4, 2, 8, dtype=torch.float32), 4)


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen2", "phi3", "olmo2", "gpt-oss"])
def test_pooling_identical_heads_loses_nothing_and_different_ones_something(family: str) -> None:
    model, ids = tiny(family), random_ids(2, 24)
    back, shape = resized(resized(model, 4)[0], 2)
    assert (shape.arch, shape.converted_from) == ("gqa", 4)
    for (name, weight), (_, same) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        torch.testing.assert_close(same, weight, atol=1e-7, rtol=1e-6, msg=name)
    one, shape = resized(model, 1)
    assert (shape.arch, shape.kv_heads, one.config.num_key_value_heads) == ("mqa", 1, 1)
    assert (logits(one, ids) - logits(model, ids)).abs().max() > 1e-2
    assert 2 * cached(one, ids)[1] == cached(model, ids)[1]


def test_pooled_weights_by_hand() -> None:
    """6 KV heads to 2: heads 0, 1, 2 become head 0, number by number."""
    model = random_llama(6, 6, 8, dtype=torch.float32)
    few, _ = resized(model, 2)
    for layer, pooled in zip(model.model.layers, few.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            old, new = getattr(layer.self_attn, name).weight, getattr(pooled.self_attn, name).weight
            assert new.shape == (16, 48)
            for head in range(2):
                for row in range(8):
                    group = sum(old[8 * (3 * head + i) + row] for i in range(3))
                    torch.testing.assert_close(new[8 * head + row], group / 3)
        assert torch.equal(layer.self_attn.q_proj.weight, pooled.self_attn.q_proj.weight)


def test_bf16_is_pooled_in_float32() -> None:
    model = random_llama(4, 4, 8, dtype=torch.bfloat16)
    few, _ = resized(model, 1)
    old = model.model.layers[0].self_attn.k_proj.weight.double().view(4, 8, 32).mean(0)
    assert torch.equal(few.model.layers[0].self_attn.k_proj.weight, old.bfloat16())


@pytest.mark.parametrize(
    ("random", "heads", "why"),
    [
        (TINY, 3, "choose from 1, 2, 4$"),
        (TINY, 8, "choose from 1, 2, 4$"),
        (TINY | {"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 4}, 6, "from 1, 2, 4, 12$"),
        ({"model_type": "gpt_neox"}, 1, "gpt_neox, mha"),
        ({"model_type": "gpt2"}, 1, "gpt2, mha"),
        ({"model_type": "opt"}, 1, "opt, mha"),
        ({"model_type": "deepseek_v3"}, 8, "deepseek_v3, mla"),
        ({"model_type": "qwen3_next"}, 1, "qwen3_next, hybrid"),
        (TINY, 0, "whole number of at least 1"),
        (TINY, "many", "whole number of at least 1"),
        (TINY, True, "whole number of at least 1"),
    ],
)
def test_what_cannot_be_converted_is_refused_from_the_config(random: dict[str, Any], heads: Any, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        describe(model_spec({"random": random, "kv_heads": heads}))
    assert "\n" not in str(refused.value) and "model.kv_heads=" in str(refused.value)


def test_weights_of_another_layout_are_refused_by_family_and_left_alone() -> None:
    model = random_llama(4, 2, 8, dtype=torch.float32)
    model.model.layers[1].self_attn.v_proj = torch.nn.Identity()
    before = copy.deepcopy(model.state_dict())
    shape = with_kv_heads(shape_of(model.config), 1, model.config, "it")
    with pytest.raises(UserError, match="LlamaForCausalLM: its key and value weights"):
        convert_kv_heads(model, shape)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_the_same_number_is_no_conversion() -> None:
    loaded = load_model(model_spec({"random": TINY, "kv_heads": 2, "device": "cpu"}))
    assert not loaded.converted and loaded.remark == "random weights, for speed and memory only"
    shape = replace(describe(model_spec({"random": TINY, "kv_heads": 4})), sliding_layers=1)
    assert shape.remark == (
        "KV heads 2 -> 4 by repeating them: same logits; "
        "1 of 2 layers are bounded by the model's own window and left alone"
    )


def test_a_sweep_over_kv_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes go as the heads, each conversion is its own cell, and what is lossy is said in the rows and on the way."""
    monkeypatch.chdir(tmp_path)
    words = [
        "model=random-tiny",
        "data=random",
        "compare=[full,kivi8]",
        "residual=32",
        "measure=[perplexity,memory]",
        "perplexity.context=40",
        "perplexity.tokens=8",
        "memory.contexts=[64]",
        "memory.tokens=2",
    ]
    assert main(["-m", "model.kv_heads=4,2,1", *words]) == 0
    said = capsys.readouterr().err
    assert said.count("not lossless") == 1 and said.count("same logits") == 1
    frame = load("results")
    held = frame[(frame["metric"] == "held_bytes.dense") & (frame["method"] == "full")].set_index("kv_heads")["value"]
    assert held[4] == 2 * held[2] == 4 * held[1]
    nll = frame[(frame["metric"] == "nll") & (frame["method"] == "full")].set_index("kv_heads")["value"]
    assert nll[4] == pytest.approx(nll[2], abs=1e-5) and abs(nll[1] - nll[2]) > 1e-4
    stated = ((4, True, "mha", "same logits"), (2, False, "gqa", ""), (1, True, "mqa", "not lossless"))
    for heads, converted, arch, note in stated:
        rows = frame[frame["kv_heads"] == heads]
        assert set(rows["converted"]) == {converted} and set(rows["arch"]) == {arch}
        assert rows["note"].fillna("").str.contains(note).all()
    assert main([*words, "model.kv_heads=2"]) == 0
    assert "all 4 cells were measured before" in capsys.readouterr().out
    assert main([*words]) == 0
    assert "all 4 cells were measured before" in capsys.readouterr().out  # 2 is what the checkpoint has
