"""Small random models for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Config of a tiny Llama, as `model.random` takes it."""


def random_llama(
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int = 2,
    vocab: int = 97,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A plain Llama in eval mode with weights drawn from `seed`; the caller's random state is kept.

    transformers keeps norms and rotary angles in float32 whatever `dtype` is.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        # Larger than a fresh model's 0.02: logits far enough apart for a wrong cache to show.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)
