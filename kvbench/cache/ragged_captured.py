"""Heads of different lengths in a decode step that is captured in a CUDA graph."""

from copy import copy
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rule import EMPTY
from kvbench.kernels.prefill import Scoring


class CapturedRagged(CacheLayerMixin):
    """A `RaggedLayer` for steps of one token: the same memory, read as far as the longest head can ever reach.

    seen: int64 [], the new token's position, advanced by its owner. slot: int64 [B, Hkv, 1], where the next token goes
    in a layer that holds its budget; a view of the eager layer's stack of free slots, which is thereby always right.
    """

    is_sliding = False
    counts = None
    """Lengths are the layer's own, a head each."""

    def __init__(self, layer: RaggedLayer, seen: Tensor) -> None:
        super().__init__()
        self.layer, self.seen, self.holds = layer, seen, layer.budget is not None
        self.whole = copy(layer)
        self.whole.longest = layer.table.shape[2] * layer.pool.block_size
        top = max(0, layer.n_free - 1)
        self.slot = layer.free[..., top : top + 1]
        if self.holds and layer.n_free == 0:
            self.slot.copy_(layer.lengths.unsqueeze(-1))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is the eager layer's."""

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["CapturedRagged", Tensor]:
        """Write one token, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], and hand on the layer itself."""
        lengths = self.layer.lengths
        slot = self.slot if self.holds else lengths.unsqueeze(-1)
        self.whole.write(slot, key, value, self.seen.to(torch.int32))
        lengths.copy_(torch.maximum(lengths, slot.squeeze(-1) + 1))
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the newest token over the slots, [B, Hq, 1, Dv]; then eviction."""
        visible = (self.whole.positions() != EMPTY).unsqueeze(2) if self.holds else None
        output = self.whole.attended(query, scoring, visible)
        if self.holds:
            self.slot.copy_(self.whole.given_up(1, cast(int, self.seen)))  # rules only compute with it
        return output

    def prepare(self) -> None:
        """Host: nothing has to be there before a step."""

    def count(self) -> bool:
        """Host: let the eager layer's counters follow one step; nothing has to be flushed then."""
        layer = self.layer
        if layer.n_free:
            layer.n_free -= 1
        else:
            layer.room -= 1
            layer.longest += 1
        layer.kept += 1
        layer.seen += 1
        if self.holds:
            layer.n_free += 1
            layer.kept -= 1
        return False

    def tensors(self) -> list[Tensor]:
        """What a step changes for good, beside rows that are not filled before it."""
        layer = self.layer
        return [layer.free, layer.position, layer.lengths, *([] if layer.scores is None else [layer.scores])]

    def get_seq_length(self) -> int:
        """Tokens seen when the cache was captured: nothing may depend on it, positions are given."""
        return self.layer.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1
