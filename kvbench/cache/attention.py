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
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over a cache layer, or over plain tensors: the model's without a cache, or a stock cache's.

    query [B, Hq, q, D] -> [B, q, Hq, Dv]. Raises UserError for attention that is not causal or carries a bias or mask
    that this harness would have to ignore.
    """
    if attention_mask is not None:
        raise UserError("an attention mask was given; kvbench takes batches of one length, without padding")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UserError(f"{type(module).__name__} does not attend causally; kvbench measures causal language models")
    unknown = sorted(name for name in ("position_bias", "alibi", "head_mask") if kwargs.get(name) is not None)
    if unknown:
        raise UserError(f"{type(module).__name__} adds {', '.join(unknown)} to its scores; kvbench does not")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scoring = Scoring(scale, softcap or None, sliding_window or None, s_aux)
    if isinstance(key, Attends):
        output = key.attend(query, scoring)
    elif key.shape[2] != query.shape[2]:
        output = stock_attention(module, query, key, cast(Tensor, value), scoring)
    else:
        output = causal_attention(query, key, cast(Tensor, value), scoring)
    return output.transpose(1, 2), None


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


def no_mask(*args: object, attention_mask: Tensor | None = None, **kwargs: object) -> None:
    """The mask function: no mask, since layers decide by positions which token sees which; padding is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError("a batch with padding was given; kvbench takes batches of one length, without padding")


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, no_mask)


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
