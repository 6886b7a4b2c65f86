"""KIVI's store for a decode step that is captured in a CUDA graph: every place is an index on the device."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.counts import CapturedSlots, Counts, Start
from kvbench.cache.residual import PerChannel, PerToken
from kvbench.kernels.parts import Dense

if TYPE_CHECKING:
    from kvbench.cache.store import Slots


class KiviCounts(Counts):
    """Counters of KIVI's layers, and the places that follow from them, each int64 [1].

    key_row, value_row: where in the residuals this step's token goes. leaving_row: the row of the value ring that
    leaves it. leaving_to: its row among the quantised values. Until the ring is full that is row 0, over and over:
    not counted as filled, nothing reads it.
    """

    def __init__(self, start: Start, seen: Tensor, residual_length: int, ring: int) -> None:
        super().__init__(start, seen)
        self.residual_length, self.ring = residual_length, ring
        self.packed_keys, self.packed_values = self.lengths[:1], self.lengths[1:2]

    def begin(self) -> None:
        super().begin()
        self.key_row = self.newest - self.packed_keys
        self.value_row = self.newest % self.ring
        self.leaving_to = self.packed_values.long()
        self.leaving_row = self.leaving_to % self.ring

    def end(self) -> None:
        super().end()
        self.packed_values.add_(self.filled - self.packed_values > self.residual_length)

    def flush(self) -> None:
        self.packed_keys.add_(self.residual_length)


class CapturedKivi(CapturedSlots):
    """The keys [quantised | residual] and the values [quantised | residual ring] of one layer, whole buffers."""

    def __init__(self, slots: "Slots", keys: PerChannel, values: PerToken) -> None:
        super().__init__(slots, [keys.groups.whole(), Dense(keys.residual)],
                         [values.groups.whole(), Dense(values.residual)])  # fmt: skip
        self.key_side, self.value_side, self.residual_length = keys, values, keys.residual_length
        self.blocks = torch.arange(self.residual_length // keys.groups.group_size, device=keys.residual.device)

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.key_side.groups.length, self.value_side.groups.length, self.slots.length

    def counts(self, start: Start, seen: Tensor) -> Counts:
        return KiviCounts(start, seen, self.residual_length, self.value_side.residual.shape[2])

    def write(self, counts: Counts, slot: Tensor, key: Tensor, value: Tensor) -> None:
        assert isinstance(counts, KiviCounts)
        self.key_side.residual.index_copy_(2, counts.key_row, key)
        self.value_side.residual.index_copy_(2, counts.value_row, value)

    def settle(self, counts: Counts) -> None:
        """Quantise the value that leaves the ring."""
        assert isinstance(counts, KiviCounts)
        if self.value_side.groups.codes.shape[2]:
            leaving = self.value_side.residual.index_select(2, counts.leaving_row)
            self.value_side.groups.put(counts.leaving_to, leaving)

    @property
    def flush_is_due(self) -> bool:
        return self.slots.length - self.key_side.groups.length >= self.residual_length

    def flush(self, counts: Counts) -> None:
        """Quantise the key residual, which holds `residual_length` tokens."""
        assert isinstance(counts, KiviCounts)
        first = counts.packed_keys.long() // self.key_side.groups.group_size
        self.key_side.groups.put(first + self.blocks, self.key_side.residual[:, :, : self.residual_length])

    def count(self) -> None:
        self.slots.length += 1
        self.key_side.length = self.value_side.length = self.slots.length
        if self.slots.length - self.value_side.groups.length > self.residual_length:
            self.value_side.groups.length += 1

    def count_flush(self) -> None:
        self.key_side.groups.length += self.residual_length
