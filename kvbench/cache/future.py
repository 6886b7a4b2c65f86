"""The attention that tokens will receive: known only to methods that may look at the tokens to come.

The full cache runs the prompt and the tokens after it in one forward, and the queries of the latter are summed. Rules
that use this are bounds to compare real rules with, not methods that a server could run.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.cache.observe import Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import RotateBack
from kvbench.errors import UserError
from kvbench.kernels.prefill import Scoring, sums_by_head

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
"""Names of the attention's last linear layer among the families of transformers."""


@dataclass(frozen=True)
class Future:
    """The tokens that will follow a batch of prompts.

    tokens: int64 [B, n], n may be 0. first_query: position of the first token whose attention counts, the prompt's
    length unless some of the prompt's own tokens ask (a question that is part of it).
    """

    tokens: Tensor
    first_query: int


@dataclass(frozen=True)
class FutureAttention(Observation):
    """Attention mass that each token receives from the future's queries: float32 [B, Hkv, T + n].

    Summed over the query heads of a KV head. output_weighted: each query head's mass is multiplied by the norm of what
    the token's value adds to the residual stream, ||W_o v||, with the head's columns of the output projection.
    """

    output_weighted: bool = False
    of_future: ClassVar[bool] = True


@dataclass(frozen=True)
class MassByHead(Observation):
    """Attention mass by query head, from the queries at `first` and after: float32 [B, Hkv, Hq / Hkv, T]."""

    first: int

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        return sums_by_head(query, key, scoring, self.first)


def future_attention(model: PreTrainedModel, layer: LayerRecord, first: int, output_weighted: bool) -> Tensor:
    """`FutureAttention` of one layer, from its record over prompt and future with `MassByHead(first)` observed."""
    mass = layer.observed[MassByHead(first)]
    if output_weighted:
        mass = mass * output_norms(model, layer, mass.shape[2])
    return mass.sum(2)


def output_norms(model: PreTrainedModel, layer: LayerRecord, heads: int) -> Tensor:
    """||W_o v|| of each token for each query head: float32 [B, Hkv, heads, T]; heads: query heads of a KV head.

    Raises UserError for latent attention and where the layer's output projection is not found.
    """
    if layer.is_shared:
        raise UserError("variant=output needs a value for each head, and latent attention has none; leave variant= out")
    value, width = layer.value.float(), layer.value.shape[-1]
    kv_heads = value.shape[1]
    weight = output_weight(model, layer.index).float()  # [hidden, Hq * Dv]
    by_head = weight.unflatten(1, (kv_heads, heads, width))  # [hidden, Hkv, heads, Dv]
    gram = torch.einsum("ohgd,ohge->hgde", by_head, by_head)  # ||W v||^2 = v' (W'W) v, without a [.., hidden] tensor
    squared = torch.einsum("bhtd,hgde,bhte->bhgt", value, gram, value)
    return squared.clamp_min(0).sqrt()


def output_weight(model: PreTrainedModel, index: int) -> Tensor:
    """The output projection's weight of a layer, [hidden, Hq * Dv]. Raises UserError where none is found."""
    layers = getattr(model.get_decoder(), "layers", None)
    attention = None if layers is None else getattr(layers[index], "self_attn", None)
    for name in OUTPUT_PROJECTIONS if attention is not None else ():
        if isinstance(projection := getattr(attention, name, None), nn.Linear):
            return projection.weight
    raise UserError(
        f"{type(model).__name__}: the output projection of layer {index} was not found; leave variant=output out"
    )
