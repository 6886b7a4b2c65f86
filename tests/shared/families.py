"""Tiny random models of other families, and Llamas whose arithmetic is float64 throughout."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.shared.models import random_llama

VOCAB = 97


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Llama's pairing of channels: i with i + D / 2. cos and sin [B, T, D], q and k [B, H, T, D]."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    return turned(q), turned(k)


class ExactRotary(nn.Module):
    """Llama's rotary angles in float64; transformers computes them in float32 whatever the model's dtype."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        half = torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim
        self.register_buffer("inv_freq", theta**-half, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class ExactNorm(nn.Module):
    """RMSNorm in float64; transformers' own rounds to float32 inside."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def exact_llama(heads: int, kv_heads: int, head_dim: int = 16, layers: int = 2) -> LlamaForCausalLM:
    """`random_llama` in float64 without a float32 step inside, so that tests can be tight (about 1e-12)."""
    model = random_llama(heads, kv_heads, head_dim, layers=layers, vocab=VOCAB)
    eps = model.config.rms_norm_eps
    model.model.rotary_emb = ExactRotary(head_dim, model.config.rope_parameters["rope_theta"])
    model.model.norm = ExactNorm(model.model.norm.weight, eps)
    for layer in model.model.layers:
        layer.input_layernorm = ExactNorm(layer.input_layernorm.weight, eps)
        layer.post_attention_layernorm = ExactNorm(layer.post_attention_layernorm.weight, eps)
    return model.double().eval()


COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
GPT2_SHARES = ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}

# name: (config class prefix, what differs from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {"rope_parameters": HALF_ROPE}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16, "layer_types": ALTERNATING},
    ),
    "olmo2": ("Olmo2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}),
    "gpt2-scaled": (
        "GPT2",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "scale_attn_by_inverse_layer_idx": True},
    ),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ALTERNATING,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "falcon": ("Falcon", {"num_kv_heads": 4, "new_decoder_architecture": True, "ffn_hidden_size": 96}),
}

# Every second layer attends, the others keep a state.
HYBRIDS: dict[str, tuple[str, dict[str, object]]] = {
    "lfm2": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}

HAS_WINDOW = ("mistral-window", "qwen2-window", "gemma2", "gemma3", "gpt-oss")


def tiny(name: str, attention: str = "eager", **overrides: object) -> PreTrainedModel:
    """A random float32 model of two layers, or four where it is a hybrid, of a family in eval mode; the caller's random
    state is kept.

    overrides: config values instead of the family's.
    """
    prefix, own = {**FAMILIES, **HYBRIDS}[name]
    shared = COMMON if prefix != "GPT2" else {k: v for k, v in COMMON.items() if k in GPT2_SHARES}
    config = getattr(transformers, f"{prefix}Config")(**{**shared, **own, **overrides})
    model_class = "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix.removesuffix('Text')}ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config)
        for parameter_name, parameter in model.named_parameters():
            # Fresh biases and sinks are zero or one; a model that ignored them would look right.
            if "bias" in parameter_name or "sinks" in parameter_name:
                nn.init.normal_(parameter, std=0.5)
    model.set_attn_implementation(attention)
    return model.eval().requires_grad_(False)


def random_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """int64 [batch, tokens], without the special ids 0, 1 and 2."""
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))
