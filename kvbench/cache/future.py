"""The attention that tokens will receive: known only to methods that may look at the tokens to come.

The full cache runs the prompt and the tokens after it in one forward, and the queries of the latter are summed. Rules
that use this are bounds to compare real rules with, not methods that a server could run.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.observe import Observation
from kvbench.cache.output_norms import layer_norms
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import RotateBack
from kvbench.kernels.prefill import Scoring, sums_by_head


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
    from_prompt: ClassVar[bool] = False


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
        mass = mass * layer_norms(model, layer, 2)
    return mass.sum(2)
