"""The shape of a model's KV cache, read from its config, and the models that kvbench cannot measure."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kvbench.errors import UserError
from kvbench.models.frequencies import FrequencyChange, frequency_change
from kvbench.models.reach import Reach, reach_of

STATES = {"linear_attention", "conv"}
"""Kinds of layers that keep a state of fixed size instead of keys and values."""
ATTENTION = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that keep keys and values. Every other kind is refused: a state beside keys and values (hybrid), no
cache at all (mlp), compressed or indexed attention."""

REFUSED = {
    "bert-generation": "is an encoder unless it is configured as a decoder",
    "diffllama": "attends twice in each layer, over halves of its values (differential attention)",
    "doge": "masks keys by values that it computes itself (dynamic mask attention)",
    "dory": "runs its layers in loops, each with keys and values of its own",
    "git": "reads images beside text",
    "jetmoe": "repeats keys and values between its cache and attention, in an order of its own",
    "minimax": "keeps a cache class of its own for its lightning attention",
}
"""Families, by model type, that cannot be measured; what each does."""

LAYOUTS = ("absorbed", "latent", "expand")
"""Layouts of the cache under multi-head latent attention; see `kvbench.cache.mla`."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's KV cache.

    Under MLA the cache holds latents: `kv_heads` is 1 and `head_dim` the latent's rank, unless `mla` is expand.
    `converted_from` is the checkpoint's number of KV heads where `model.kv_heads` asked for another.
    `max_positions` is None where the config names no limit.
    `sliding_layers` counts the layers whose cache a window bounds already, `state_layers` those that keep a state of
    fixed size instead of keys and values; the rest of the facts is that of the attention layers.
    """

    arch: str  # mha | gqa | mqa | mla | hybrid
    kv_heads: int
    converted_from: int | None
    query_heads: int
    head_dim: int
    value_dim: int
    n_layers: int
    max_positions: int | None
    sliding_layers: int
    state_layers: int
    vocab_size: int
    mla: str | None  # one of LAYOUTS; None for a model without latent attention
    frequency_change: FrequencyChange | None  # where rotary frequencies change with the length of the text

    @property
    def converted(self) -> bool:
        return self.converted_from is not None

    @property
    def remark(self) -> str | None:
        """Facts about this model that readers of its rows need; None where there are none."""
        said = []
        if self.converted_from is not None:
            exact = self.kv_heads > self.converted_from
            how = "by repeating them: same logits" if exact else "by mean-pooling key and value weights: not lossless"
            said.append(f"KV heads {self.converted_from} -> {self.kv_heads} {how}")
        if self.sliding_layers:
            said.append(
                f"{self.sliding_layers} of {self.n_layers} layers are bounded by the model's own window and left alone"
            )
        if self.state_layers:
            said.append(f"{self.state_layers} of {self.n_layers} layers keep a state of fixed size and are left alone")
        return "; ".join(said) or None


def mla_layout(config: Any) -> str | None:
    """How a model with multi-head latent attention is cached, None for others.

    Read from the config's `mla_layout`, which `choose_mla_layout` writes; absorbed by default.
    """
    if getattr(config, "kv_lora_rank", None) is None:
        return None
    return str(getattr(config, "mla_layout", LAYOUTS[0]))


def choose_mla_layout(config: Any, layout: str | None, name: str) -> None:
    """Write the wanted layout to the config. Raises UserError for a model without latent attention."""
    if layout is None:
        return
    if mla_layout(config) is None:
        raise UserError(
            f"model.mla={layout} is for models with multi-head latent attention (DeepSeek V2, V3), and {name} has "
            "none; leave model.mla out"
        )
    config.mla_layout = layout


def shape_of(config: Any) -> ModelShape:
    """Read the shape from a transformers config of a decoder-only model."""
    query_heads: int = config.num_attention_heads
    latent_rank, mla = getattr(config, "kv_lora_rank", None), mla_layout(config)
    if latent_rank is not None:
        kv_heads, head_dim, value_dim = 1, latent_rank, latent_rank
        if mla == "expand":
            kv_heads, head_dim = query_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
            value_dim = config.v_head_dim
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
        if getattr(config, "multi_query", False):  # GPTBigCode's way of saying one
            kv_heads = 1
        head_dim = value_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    kinds = layer_kinds(config)
    if any(kind not in ATTENTION for kind in kinds):
        arch = "hybrid"
    else:
        arch = "mla" if latent_rank is not None else shared_heads(kv_heads, query_heads)
    return ModelShape(
        arch=arch,
        kv_heads=kv_heads,
        converted_from=None,
        query_heads=query_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        n_layers=config.num_hidden_layers,
        max_positions=getattr(config, "max_position_embeddings", None),
        sliding_layers=sum(reach is not None for reach in layer_reaches(config)),
        state_layers=sum(kind in STATES for kind in kinds),
        vocab_size=config.vocab_size,
        mla=mla,
        frequency_change=frequency_change(config),
    )


def shared_heads(kv_heads: int, query_heads: int) -> str:
    """mha | gqa | mqa"""
    if kv_heads == query_heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def with_kv_heads(shape: ModelShape, wanted: int | None, config: Any, name: str) -> ModelShape:
    """The shape after `model.kv_heads`; as it is where that asks for nothing new.

    Raises UserError for a number that the heads cannot be repeated or pooled to, and for a family without KV heads.
    """
    if wanted is None or (wanted == shape.kv_heads and shape.arch != "mla"):
        return shape
    if shape.arch in ("mla", "hybrid") or getattr(config, "num_key_value_heads", None) is None:
        raise UserError(
            f"model.kv_heads={wanted} cannot be had from {name} ({config.model_type}, {shape.arch}): it keeps no keys "
            "and values in heads that can be repeated or pooled; leave it out"
        )
    fitting = [
        n
        for n in range(1, shape.query_heads + 1)
        if shape.query_heads % n == 0 and (n % shape.kv_heads == 0 or shape.kv_heads % n == 0)
    ]
    if wanted not in fitting:
        raise UserError(
            f"model.kv_heads={wanted} does not fit {name}, with {shape.query_heads} query heads and {shape.kv_heads} "
            f"KV heads; choose from {', '.join(map(str, fitting))}"
        )
    return replace(shape, kv_heads=wanted, converted_from=shape.kv_heads, arch=shared_heads(wanted, shape.query_heads))


def layer_kinds(config: Any) -> list[str]:
    """One kind a layer, as transformers' own cache reads it: `layer_types`, else the window all share."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is not None:
        return list(kinds)
    if getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    return [kind] * int(config.num_hidden_layers)


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer with keys and values, in tokens; None for those that attend to everything."""
    return [None if reach is None else reach.window for reach in layer_reaches(config)]


def layer_reaches(config: Any) -> list[Reach | None]:
    """How far each layer with keys and values sees; None for those that attend to everything.

    A key of the config counts only where the family's code builds a mask from it: Llama's has no sliding window,
    whatever its config says. `kvbench.gate` holds the answer against the masks that the loaded model builds.
    """
    kinds = [kind for kind in layer_kinds(config) if kind not in STATES]
    source = modelling_source(type(config))  # type: ignore[arg-type]
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    slides = reach_of(window if "create_sliding_window_causal_mask" in source else None, config, chunked=False)
    chunks = reach_of(chunk if "create_chunked_causal_mask" in source else None, config, chunked=True)
    if "layer_types" not in source:  # one mask for all layers
        return [slides or chunks] * len(kinds)
    reaches = {"sliding_attention": slides, "chunked_attention": chunks}
    return [reaches.get(kind) for kind in kinds]


@cache
def modelling_source(config_class: type) -> str:
    """The source text of the family's modelling file; for a class that transformers does not know, the names of all
    masks, so that the config's keys are believed."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "create_sliding_window_causal_mask create_chunked_causal_mask layer_types"
    return inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__module__])


def state_numbers(config: Any) -> tuple[int, int]:
    """Numbers in the states of all layers for a row: those in the model's dtype, and those in float32.

    A convolution keeps its last inputs. Linear attention by the gated delta rule (arXiv 2412.06464) also keeps a
    key_dim x value_dim matrix a head, which it sums in float32. Raises UserError for a family that states its sizes in
    another way.
    """
    kinds = layer_kinds(config)
    convolutions, linear = kinds.count("conv"), kinds.count("linear_attention")
    named = ["conv_L_cache"] * bool(convolutions) + ["linear_conv_kernel_dim"] * bool(linear)
    if not all(hasattr(config, name) for name in named):
        raise UserError(
            f"{config.model_type} has layers that keep a state whose size its config does not tell as LFM2 or "
            "Qwen3-Next do, so its cache cannot be planned; measure it with measure=[memory]"
        )
    narrow, wide = 0, 0
    if convolutions:
        narrow += convolutions * config.hidden_size * config.conv_L_cache
    if linear:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        narrow += linear * (2 * keys + values) * config.linear_conv_kernel_dim
        wide += linear * values * config.linear_key_head_dim
    return narrow, wide


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise UserError for a config that is not a decoder-only language model on its own."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    kind = config.model_type
    if kind in REFUSED and not (kind == "bert-generation" and config.is_decoder):
        raise UserError(f"{name} ({kind}) {REFUSED[kind]}, which kvbench does not follow: choose another model")
    if getattr(config, "is_heterogeneous", False):  # before anything is read that may differ from layer to layer
        raise UserError(
            f"{name} ({kind}) has layers with heads of different sizes or numbers, which kvbench does not follow: "
            "choose a model whose layers are alike (Gemma 3, Llama, Qwen3 ...)"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UserError(
            f"{name} ({kind}) has {config.num_kv_shared_layers} layers that attend over another layer's keys and "
            "values, which kvbench does not follow: choose a model whose layers keep their own (Gemma 3, Llama ...)"
        )
    if mla_layout(config) is not None and getattr(config, "index_topk", None) is not None:
        raise UserError(
            f"{name} ({kind}) attends to a selection of its latents, and its cache cannot be taken over: choose a "
            "model with DeepSeek V2's or V3's latent attention"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} ({kind}) is an encoder-decoder model: kvbench measures decoder-only language models")
    if config.get_text_config() is not config:
        raise UserError(f"{name} ({kind}) is multimodal: kvbench measures text-only language models, give one of those")
    # `is_decoder` alone is no sign: GPT-NeoX is causal and leaves it false.
    if getattr(config, "is_decoder", True) is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        raise UserError(f"{name} ({kind}) is an encoder without causal attention: kvbench measures causal models")
    if getattr(config, "num_attention_heads", None) is None:
        raise UserError(f"{name} ({kind}) has no attention heads, so no KV cache to shrink: choose a transformer")
    kinds = layer_kinds(config)
    unsupported = sorted(set(kinds) - ATTENTION - STATES)
    if unsupported:
        raise UserError(
            f"{name} ({kind}) has {', '.join(unsupported)} layers, whose cache kvbench does not follow: choose a model "
            "whose layers keep either keys and values or a state (Llama, LFM2, Qwen3-Next)"
        )
    if STATES.issuperset(kinds):
        raise UserError(f"{name} ({kind}) has no attention layers, so no KV cache to shrink: choose another model")


def refuse_without_attention_interface(model_class: type, name: str) -> None:
    """Raise UserError for a family that computes attention itself, where no cache of ours can attend.

    The module of such a class never looks up transformers' `ALL_ATTENTION_FUNCTIONS` (Falcon, BLOOM, MPT).
    The class's own `_supports_attention_backend` says less: hybrids leave it unset although their attention
    layers do look up.
    """
    if hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return
    family = model_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    raise UserError(
        f"{name} of the {family} family computes attention in its own code, not through transformers' "
        "AttentionInterface, so a compressed cache cannot be attended over; choose another family, one that uses "
        "it (Llama, Qwen, Mistral, Gemma ...)"
    )


def window_kv_heads(config: Any, kv_heads: int) -> int:
    """KV heads of sliding-window layers, where `kv_heads` are those of the others: MiMo V2 Flash gives them twice."""
    return 2 * kv_heads if config.model_type == "mimo_v2_flash" else kv_heads
