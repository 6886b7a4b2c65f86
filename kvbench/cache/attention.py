"""The one attention function that transformers calls, and its mask function.

A cache layer's `update` returns the layer itself in place of keys. The model passes the layer to the attention
function, which calls the layer's `attend`. No store is unpacked, and no tensor is concatenated or repeated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvbench.cache.mla import latents_handed_on
from kvbench.errors import UserError
from kvbench.kernels.prefill import Scoring, causal_attention
from kvbench.models.reach import Reach, reach_of
from kvbench.models.shape import refuse_without_attention_interface

IMPLEMENTATION = "kvbench"


@runtime_checkable
class Attends(Protocol):
    """A cache layer that does its own attention."""

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """[B, Hq, q, Dv] from query [B, Hq, q, D]."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Attends,
    value: Tensor | Attends,
    attention_mask: Tensor | Reach | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over a cache layer, or over plain tensors: the model's without a cache, or a stock cache's.

    query [B, Hq, q, D] -> [B, q, Hq, Dv]. attention_mask: what `mask` below gave the layer. It alone bounds what the
    layer sees, whatever window the layer names besides. Raises UserError for attention that is not causal or carries a
    bias or mask that this harness would have to ignore.
    """
    reach = attention_mask if isinstance(attention_mask, Reach) else None
    if attention_mask is not reach:
        raise UserError("an attention mask was given; kvbench takes batches of one length, without padding")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UserError(f"{type(module).__name__} does not attend causally; kvbench measures causal language models")
    unknown = sorted(name for name in ("position_bias", "alibi", "head_mask") if kwargs.get(name) is not None)
    if unknown:
        raise UserError(f"{type(module).__name__} adds {', '.join(unknown)} to its scores; kvbench does not")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window, chunked = (None, False) if reach is None else (reach.window, reach.chunked)
    scoring = Scoring(scale, softcap or None, window, s_aux, chunked)
    if isinstance(key, Attends):
        output = key.attend(query, scoring)
    elif key.shape[2] != query.shape[2]:
        output = stock_attention(module, query, key, cast(Tensor, value), scoring)
    else:
        output = causal_attention(query, key, cast(Tensor, value), scoring)
    return output.transpose(1, 2).contiguous(), None  # some models (AFMoE) take a view of it


def stock_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention over the floats that a cache of transformers' returns, [B, Hq, q, Dv], by torch's sdpa.

    Raises UserError for scores that sdpa does not compute: soft-capped, windowed, or with attention sinks.
    """
    if scoring.softcap is not None or scoring.window is not None or scoring.sink_logits is not None:
        raise UserError(
            f"{type(module).__name__} scores in a way that sdpa, which transformers' own caches decode "
            "through, does not know; choose methods whose names do not begin with hf_"
        )
    q, slots = query.shape[2], key.shape[2]
    seen = None if q == 1 else torch.ones(q, slots, dtype=torch.bool, device=query.device).tril(slots - q)
    output, _ = sdpa_attention_forward(
        module, query, key, value, None if seen is None else seen[None, None], scaling=scoring.scaling
    )
    turned: Tensor = output.transpose(1, 2)
    return turned


def mask(
    *args: object,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: object = None,
    use_vmap: bool = False,
    **kwargs: object,
) -> Reach | None:
    """The mask function: how far a layer sees, None where it sees every token. Cache layers do the rest by positions.

    local_size: of the sliding window or chunk. use_vmap: whether the model combines the causal mask with one of its
    own. Raises UserError for such a mask, and for padding.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError("a batch with padding was given; kvbench takes batches of one length, without padding")
    if use_vmap:
        family = getattr(config, "model_type", "this model")
        raise UserError(f"{family} combines causal attention with a mask of its own, which kvbench does not follow")
    return reach_of(local_size, config)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)


@contextmanager
def kvbench_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model attends through kvbench; afterwards its own implementation is set again.

    Raises UserError for a family that does not go through transformers' attention interface.
    """
    before = model.config._attn_implementation
    if before == IMPLEMENTATION:
        yield
        return
    refuse_without_attention_interface(type(model), type(model).__name__)
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        with latents_handed_on(model):
            yield
    finally:
        model.set_attn_implementation(before)
