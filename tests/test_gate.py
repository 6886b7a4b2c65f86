"""The gate: exact families pass, and a model whose cache would be wrong is refused in one line with its difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench import gate as gate_module
from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.gate import Everything, gate
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.h2o import H2O
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.load import LoadedModel, load_model, model_spec
from kvbench.models.reach import Reach
from tests.shared.families import COMMON, LONGROPE

pytestmark = pytest.mark.engine

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def loaded_of(kind: str, **settings: Any) -> LoadedModel:
    node = {"random": {"model_type": kind, **COMMON, **settings}, "device": "cpu"}
    return load_model(model_spec(node))


def ids_of(tokens: int) -> Tensor:
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(0))


def off_by(loaded: LoadedModel, ids: Tensor, prompt: int, rule: KeepRule | None = None) -> float:
    """Largest difference to the model's own forward from the prompt's last token on, over the largest logit."""
    own = loaded.model(input_ids=ids, use_cache=False).logits[:, prompt - 1 :]
    method = Method("full", rule or Everything(), DenseStore())
    cache = build_cache(loaded.model, method, ids[:, :prompt], ids.shape[1] - prompt)
    logits = [
        cache.last_logits[:, None],
        *(step(loaded.model, ids[:, t : t + 1], cache) for t in range(prompt, ids.shape[1])),
    ]
    return float((torch.cat(logits, 1) - own).abs().max() / own.abs().max())


CHUNKED = {
    "attention_chunk_size": 64,
    "head_dim": 16,
    "intermediate_size_mlp": 96,
    "layer_types": ["chunked_attention", "full_attention"],
    **EXPERTS,
}


@pytest.mark.parametrize(
    ("kind", "settings", "prompt", "total", "bounded"),
    [
        ("llama4_text", CHUNKED, 128, 144, [64, None]),
        ("llama4_text", CHUNKED, 50, 200, [64, None]),
        ("phimoe", {"sliding_window": 32, **EXPERTS}, 128, 144, [32, 32]),
        ("llama", {"sliding_window": 16}, 40, 60, [None, None]),
        ("phi3", {"sliding_window": 4096}, 40, 60, [None, None]),
    ],
)
def test_what_bounds_a_layer_is_what_its_mask_function_does(
    kind: str, settings: dict[str, Any], prompt: int, total: int, bounded: list[int | None]
) -> None:
    """Chunks (Llama 4), a window that attention is not told of (PhiMoE), a window that the family ignores (Llama), and
    one that no position exceeds (Phi 3.5)."""
    loaded = loaded_of(kind, **settings)
    assert off_by(loaded, ids_of(total), prompt) < 1e-5
    assert loaded.sliding_layers == sum(window is not None for window in bounded)
    cache = build_cache(loaded.model, Method("h2o", H2O(8), DenseStore()), ids_of(prompt), 4)
    kept = [layer.kept for layer in cache.attention_layers]
    assert kept == [8 if window is None else min(prompt, window - 1) for window in bounded]


def test_chunks_hold_for_many_tokens_in_one_step_across_a_chunks_end() -> None:
    loaded, ids = loaded_of("llama4_text", **CHUNKED), ids_of(140)
    own = loaded.model(input_ids=ids, use_cache=False).logits
    cache = build_cache(loaded.model, Method("full", Everything(), DenseStore()), ids[:, :60], 80, max_step=20)
    for at in range(60, 140, 20):
        ours = step(loaded.model, ids[:, at : at + 20], cache, logits_to_keep=0)
        torch.testing.assert_close(ours, own[:, at : at + 20], atol=1e-5 * float(own.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("prompt", "fed", "fits"), [(100, 28, True), (100, 29, False), (129, 20, True), (128, 1, False)]
)
def test_longrope_is_refused_where_decoding_crosses_from_short_to_long_factors(
    prompt: int, fed: int, fits: bool
) -> None:
    loaded = loaded_of("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=128)
    if fits:
        assert off_by(loaded, ids_of(prompt + fed), prompt) < 1e-5
        return
    with pytest.raises(
        UserError, match=r"Phi3ForCausalLM has longrope .* beyond 128 tokens.*; stay within 128 tokens, or give a"
    ):
        off_by(loaded, ids_of(prompt + fed), prompt)


@pytest.mark.parametrize(("prompt", "fed", "fits"), [(40, 24, True), (40, 25, False), (80, 1, False)])
def test_dynamic_frequencies_are_refused_beyond_the_models_positions(prompt: int, fed: int, fits: bool) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    loaded = loaded_of("llama", rope_parameters=rope, max_position_embeddings=64)
    if fits:
        assert off_by(loaded, ids_of(prompt + fed), prompt) < 1e-5
        return
    with pytest.raises(UserError, match="LlamaForCausalLM has dynamic rotary frequencies.*; stay within 64 tokens$"):
        off_by(loaded, ids_of(prompt + fed), prompt)


def hunyuan() -> LoadedModel:
    """Queries and keys are normed after their rotation, by weights that are not all one."""
    loaded = loaded_of("hunyuan_v1_dense", head_dim=16, num_hidden_layers=1)
    for name, weight in loaded.model.named_parameters():
        if "layernorm" in name and "self_attn" in name:
            nn.init.uniform_(weight, 0.2, 2.0, generator=torch.Generator().manual_seed(0))
    return loaded


@pytest.mark.parametrize("rule", [StreamingLLM(budget=20), ExpectedAttention(budget=20)])
def test_a_norm_after_the_rotation_is_refused_where_rotations_are_taken_back(rule: KeepRule) -> None:
    with pytest.raises(UserError, match="HunYuan.* changes queries and keys after their rotation"):
        build_cache(hunyuan().model, Method("m", rule, DenseStore()), ids_of(40))
    assert gate(hunyuan()).difference < 1e-5


def test_lowrank_is_refused_there_too() -> None:
    from kvbench.cache.rotary import key_rotations

    with pytest.raises(UserError, match="HunYuan.* choose another store than lowrank"):
        key_rotations(hunyuan().model, 1)


def test_the_line_says_the_difference_and_the_steps() -> None:
    found = gate(loaded_of("llama"))
    assert found.difference < 1e-5 and found.steps == 32
    assert found.line == f"full cache equals the model's forward: max difference {found.difference:.0e} over 32 steps"
    assert found.change is None


def test_the_gate_names_where_frequencies_change_and_leaves_the_model_as_it_was() -> None:
    loaded = loaded_of("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=128, sliding_window=100)
    ids = ids_of(60)
    before = loaded.model(input_ids=ids, use_cache=False).logits
    found = gate(loaded)
    assert found.change is not None and (found.change.kind, found.change.tokens) == ("longrope", 128)
    assert loaded.model.config.sliding_window == 100
    assert torch.equal(loaded.model(input_ids=ids, use_cache=False).logits, before)


def test_an_engine_that_ignores_a_chunk_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks agree with the config, but attention takes a chunk for a sliding window: the predictions tell."""
    loaded = loaded_of("llama4_text", **CHUNKED)
    monkeypatch.setattr("kvbench.cache.attention.reach_of", lambda size, config: None if size is None else Reach(size))
    with pytest.raises(UserError, match=r"Llama4ForCausalLM\): the full cache differs .* by \de[+-]0\d of the largest"):
        gate(loaded)


def test_a_config_that_is_read_wrongly_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of("mistral", sliding_window=256)
    monkeypatch.setattr(gate_module, "layer_reaches", lambda config: [None, None])
    with pytest.raises(UserError, match="layer 0 masks its attention at position 256 in another way than full causal"):
        gate(loaded)


def test_frequencies_that_change_unannounced_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=128)
    monkeypatch.setattr(gate_module, "frequency_change", lambda config: None)
    with pytest.raises(UserError, match="rotates the key of position 125 differently once the text is longer than 128"):
        gate(loaded)


def test_a_model_that_amplifies_rounding_is_judged_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own forwards of a text and of the text's beginning differ by 1e-4: 16 times that is allowed, but no more
    than 1e-2; nothing is allowed to a model whose own forwards agree."""
    model = loaded_of("llama")
    for ours, own, allowed in ((7e-4, 1e-4, True), (2e-3, 1e-4, False), (9e-3, 1e-2, True), (2e-2, 1e-2, False)):
        monkeypatch.setattr(gate_module, "compare", lambda *given, ours=ours: (ours, ours))
        monkeypatch.setattr(gate_module, "own_rounding", lambda *given, own=own: own)
        if allowed:
            assert gate(model).difference == ours
        else:
            with pytest.raises(UserError, match="differs from the model's own forward"):
                gate(model)


def test_own_rounding_is_small_for_a_causal_model_and_large_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded_of("llama")
    config = model.model.config
    assert gate_module.own_rounding(model, config, 64, 32) < 1e-5
    own = model.model.forward

    def looks_ahead(input_ids: Tensor, **settings: Any) -> Any:
        found = own(input_ids=input_ids, **settings)
        found.logits[:, :-1] = found.logits[:, 1:].clone()
        return found

    monkeypatch.setattr(model.model, "forward", looks_ahead)
    assert gate_module.own_rounding(model, config, 64, 32) > 1e-2


def test_predictions_that_are_no_numbers_are_refused() -> None:
    loaded = loaded_of("llama")
    loaded.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="differs from the model's own forward by inf"):
        gate(loaded)


def test_a_model_that_does_not_run_on_the_cache_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.models.shape.REFUSED", {})
    with pytest.raises(
        UserError, match=r"DiffLlamaForCausalLM\) cannot run on kvbench's cache: attention before update"
    ):
        gate(loaded_of("diffllama", head_dim=16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_dtype_passes(dtype: str) -> None:
    node = {"random": {"model_type": "gemma3_text", **COMMON, "head_dim": 16, "sliding_window": 100}, "device": "cpu"}
    assert gate(load_model(model_spec({**node, "dtype": dtype}))).steps == 32


def test_few_positions_shorten_the_prompt() -> None:
    found = gate(loaded_of("gpt2", n_positions=40, n_embd=64, n_head=4, n_layer=2, max_position_embeddings=40))
    assert found.difference < 1e-5 and found.steps == 20
    assert found.line.endswith("over 20 steps")


def test_smollm2_passes(smollm2: LoadedModel) -> None:
    assert gate(smollm2).difference < 1e-5
