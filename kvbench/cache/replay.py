"""The attention that a prompt's tokens receive while the model repeats the prompt: what KVzip ranks tokens by.

The prompt is repeated in chunks behind its own cache, each after an instruction to repeat. A token's number is the
largest probability that it receives from any token of the instruction and of the repeated chunk that it belongs to.
Only the chunk, the first tokens of the prompt and what is fed count in that softmax, as in the authors' repository.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.counters import Counters
from kvbench.cache.forward import forward
from kvbench.cache.layer_base import EngineLayer
from kvbench.cache.observe import Observation
from kvbench.cache.record import LayerRecord, PrefillRecord
from kvbench.cache.state import in_model_order
from kvbench.errors import UserError
from kvbench.kernels.prefill import Scoring, probability_blocks
from kvbench.models.shape import mla_layout


@dataclass(frozen=True)
class ReplayAttention(Observation):
    """Largest probability from the replay, for each query head: float32 [B, Hkv, Hq / Hkv, T].

    instruction: token ids that are fed before each chunk. chunk: tokens that are repeated at a time. n_sink: first
    tokens that count in the softmax of every chunk.
    """

    instruction: tuple[int, ...] = ()
    chunk: int = 2048
    n_sink: int = 4
    from_prompt: ClassVar[bool] = False


class ReplayLayer(EngineLayer):
    """A recorded layer with one chunk of its prompt fed again behind it; nothing is added to the record.

    columns: the chunk's tokens. n_sink: first tokens that count in every softmax. largest: float32
    [B, Hkv, Hq / Hkv, chunk], the result, None for layers with a sliding window.
    """

    def __init__(self, record: LayerRecord, columns: slice, n_sink: int) -> None:
        super().__init__(Counters())
        tokens = record.key.shape[2]
        self.counters.fill(tokens, tokens)
        self.record, self.columns, self.n_sink = record, columns, n_sink
        self.key, self.value = record.key, record.value
        self.largest: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["ReplayLayer", Tensor]:
        """Take what is fed, [B, Hkv, q, D] and [B, Hkv, q, Dv]."""
        self.key = torch.cat([self.record.key, key], dim=2)
        self.value = torch.cat([self.record.value, value], dim=2)
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Exact attention over prompt and what is fed, [B, Hq, q, Dv]."""
        prompt = self.record.key.shape[2]
        whole = torch.cat([query.new_zeros(*query.shape[:2], prompt, query.shape[-1]), query], dim=2)
        output = query.new_empty(*query.shape[:3], self.value.shape[-1])
        for rows, columns, probabilities in probability_blocks(whole, self.key, scoring, prompt):
            block = probabilities.flatten(2, 3) @ self.value[:, :, columns].to(probabilities.dtype)
            here = slice(rows.start - prompt, rows.stop - prompt)
            output[:, :, here] = block.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2).to(query.dtype)
            if scoring.window is None:
                self._note(probabilities, prompt)
        return output

    def _note(self, probabilities: Tensor, prompt: int) -> None:
        """Keep the largest probabilities of the chunk's tokens, [B, Hkv, Hq / Hkv, q, T + fed], renormalised."""
        first, last = self.columns.start, self.columns.stop
        counted = probabilities[..., first:last].sum(-1) + probabilities[..., prompt:].sum(-1)
        counted += probabilities[..., : min(self.n_sink, first)].sum(-1)
        found = (probabilities[..., first:last] / counted.unsqueeze(-1)).amax(-2).to(torch.float32)
        self.largest = found if self.largest is None else torch.maximum(self.largest, found)


def replay(model: PreTrainedModel, record: PrefillRecord, wanted: ReplayAttention) -> list[Tensor | None]:
    """`ReplayAttention` of each recorded layer; None where it has a sliding window.

    Raises UserError for latent attention, and for a prompt that fills the model's positions.
    """
    if mla_layout(model.config) is not None:
        raise UserError("a replay needs keys for each head, and latent attention has none; choose method=snapkv")
    found: list[list[Tensor]] = [[] for _ in record.layers]
    for start in range(0, record.prompt_tokens, wanted.chunk):
        columns = slice(start, min(start + wanted.chunk, record.prompt_tokens))
        layers = [ReplayLayer(layer.at_home(), columns, wanted.n_sink) for layer in record.layers]
        _feed(model, record, layers, wanted.instruction, columns)
        for parts, layer in zip(found, layers, strict=True):
            parts += [] if layer.largest is None else [layer.largest]
    return [torch.cat(parts, dim=-1) if parts else None for parts in found]


def _feed(
    model: PreTrainedModel, record: PrefillRecord, layers: list[ReplayLayer], instruction: Sequence[int], columns: slice
) -> None:
    before = record.ids.new_tensor(instruction).expand(record.ids.shape[0], -1)
    ids = torch.cat([before, record.ids[:, columns]], dim=1)
    cache = Cache(layers=in_model_order(layers, [state.copy() for state in record.states]))
    with kvbench_attention(model):
        forward(model, ids, cache, logits_to_keep=1)
