"""KIVI's store for a decode step that is captured in a CUDA graph: every place is an index on the device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvbench.cache.counts import CapturedSlots, Counts, Start
from kvbench.cache.residual import Side

if TYPE_CHECKING:
    from kvbench.cache.store import Slots


class KiviCounts(Counts):
    """Counters of KIVI's layers, for keys and for values.

    packed: int32 [1] each, views of the lengths. rows: int64 [1] each, where in the residual this step's token goes.
    rings: sizes of the residuals that are rings; None for those that are quantised in blocks.
    """

    def __init__(self, start: Start, seen: Tensor, residual_length: int, rings: Sequence[int | None]) -> None:
        super().__init__(start, seen)
        self.residual_length, self.rings = residual_length, rings
        self.packed = self.lengths[:1], self.lengths[1:2]

    def begin(self) -> None:
        super().begin()
        self.rows = [
            self.newest - packed if ring is None else self.newest % ring
            for packed, ring in zip(self.packed, self.rings, strict=True)
        ]

    def end(self) -> None:
        super().end()
        for packed, ring in zip(self.packed, self.rings, strict=True):
            if ring is not None:
                packed.add_(self.filled - packed > self.residual_length)

    def flush(self) -> None:
        for packed, ring in zip(self.packed, self.rings, strict=True):
            if ring is None:
                packed.add_(self.residual_length)


class CapturedKivi(CapturedSlots):
    """The keys [quantised | residual] and the values [quantised | residual] of one layer, whole buffers."""

    def __init__(self, slots: "Slots", keys: Side, values: Side) -> None:
        super().__init__(slots, keys.whole(), values.whole())
        self.sides, self.residual_length = (keys, values), keys.residual_length

    @property
    def lengths(self) -> tuple[int, int, int]:
        keys, values = (side.groups.length for side in self.sides)
        return keys, values, self.slots.length

    def counts(self, start: Start, seen: Tensor) -> Counts:
        return KiviCounts(start, seen, self.residual_length, [side.ring for side in self.sides])

    def write(self, counts: Counts, slot: Tensor, key: Tensor, value: Tensor) -> None:
        assert isinstance(counts, KiviCounts)
        for side, row, new in zip(self.sides, counts.rows, (key, value), strict=True):
            side.residual.index_copy_(2, row, new)

    def settle(self, counts: Counts) -> None:
        """Quantise what leaves a ring."""
        assert isinstance(counts, KiviCounts)
        for side, packed in zip(self.sides, counts.packed, strict=True):
            side.quantise_oldest(packed)

    @property
    def flush_is_due(self) -> bool:
        return any(side.block_is_due for side in self.sides)

    def flush(self, counts: Counts) -> None:
        """Quantise the residuals that hold a block of `residual_length` tokens."""
        assert isinstance(counts, KiviCounts)
        for side, packed in zip(self.sides, counts.packed, strict=True):
            side.quantise_block(packed)

    def count(self) -> None:
        self.slots.length += 1
        for side in self.sides:
            side.count()

    def count_flush(self) -> None:
        for side in self.sides:
            if side.block_is_due:
                side.groups.length += self.residual_length
