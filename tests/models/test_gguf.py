"""GGUF files: rotary scaling that transformers' loader drops, endings in capitals, split files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.cli.downloads import rebuild
from kvbench.errors import UserError
from kvbench.models.load import describe, load_model, model_spec

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
TOKENS = ["<unk>", "<s>", "</s>", "ab", *map(chr, range(97, 123))]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def llama(rope: dict[str, Any]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        rope_parameters=rope,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp pairs them."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(path: Path, model: LlamaForCausalLM, keys: dict[str, Any], factors: np.ndarray | None = None) -> None:
    """The model as llama.cpp's converter writes it, with a tokenizer of a few letters."""
    writer = GGUFWriter(path, "llama")
    config = model.config
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": 16,
        "vocab_size": config.vocab_size,
    }
    for key, size in sizes.items():
        writer.add_uint32(f"llama.{key}", size)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 1e4)
    for key, value in keys.items():
        kind = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}.get(type(value), GGUFValueType.UINT32)
        writer.add_key_value(key, value, kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SCALING = "llama.rope.scaling."


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (LLAMA3, {}),
        (LINEAR, {f"{SCALING}type": "linear", f"{SCALING}factor": 4.0}),
        (LINEAR, {"llama.rope.scale_linear": 4.0}),
        (YARN, {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 64}),
    ],
)
def test_scaled_rotary_embeddings_are_taken_over(tmp_path: Path, rope: dict[str, Any], keys: dict[str, Any]) -> None:
    """Llama 3.1's factors come as a tensor, the others as keys: logits at 500 tokens are those of the model written."""
    model, path = llama(rope), tmp_path / "scaled.GGUF"
    factors = None
    if rope is LLAMA3:
        plain = llama({"rope_type": "default", "rope_theta": 1e4}).model.rotary_emb.inv_freq
        factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    write_gguf(path, model, keys, factors)
    loaded = load_model(model_spec({"path": str(path), "device": "cpu"}))
    assert (loaded.source, loaded.name) == ("gguf", "scaled")
    ids = torch.randint(3, len(TOKENS), (1, 500), generator=torch.Generator().manual_seed(0))
    own = model(ids).logits
    assert float((loaded.model(ids).logits - own).abs().max()) < 1e-4 * float(own.abs().max())


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({f"{SCALING}type": "longrope", f"{SCALING}factor": 4.0}, "type=longrope with factor, which"),
        ({f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}, "type=yarn with factor, which"),
        ({"split.count": 3}, "one of 3 parts of a split GGUF file.*llama-gguf-split --merge"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama(LINEAR), keys)
    with pytest.raises(UserError, match=why) as refused:
        describe(model_spec({"path": str(path)}))
    assert "\n" not in str(refused.value)


def test_a_folder_is_not_made_of_a_file_whose_rotary_scaling_it_would_lose(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama(LINEAR), {f"{SCALING}type": "linear", f"{SCALING}factor": 4.0})
    checksum = hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    with pytest.raises(UserError, match="scales its rotary embedding, which a model folder made from it would lose"):
        rebuild(tmp_path, checksum)
