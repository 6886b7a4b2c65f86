"""KIVI's store for a decode step that is captured in a CUDA graph: every place is an index on the device."""

from collections.abc import Sequence

from torch import Tensor

from kvbench.cache.counters import Counters, DeviceCounters
from kvbench.cache.residual import Schedule, Side
from kvbench.cache.slots import CapturedSlots, Slots


class KiviCounters(DeviceCounters):
    """Counters on the device for layers that hold keys and values as KIVI does.

    schedules: of the keys' residual and of the values'. quantised: int32 [1] each, how many are quantised; views of
    `lengths`. rows: int64 [1] each, where in the residual the token of this step goes.
    """

    def __init__(
        self, counters: Counters, seen: Tensor, packed: tuple[int, int], schedules: Sequence[Schedule]
    ) -> None:
        super().__init__(counters, seen, packed)
        self.schedules, self.quantised = schedules, (self.lengths[:1], self.lengths[1:2])

    def accept(self) -> None:
        super().accept()
        self.rows = [
            schedule.row(self.newest, quantised)
            for schedule, quantised in zip(self.schedules, self.quantised, strict=True)
        ]

    def evict(self) -> None:
        """Count the evicted token, and the tokens that have left a ring."""
        super().evict()
        for schedule, quantised in zip(self.schedules, self.quantised, strict=True):
            if schedule.ring is not None:
                quantised.add_(schedule.is_due(self.written, quantised))

    def flush(self) -> None:
        for schedule, quantised in zip(self.schedules, self.quantised, strict=True):
            if schedule.ring is None:
                quantised.add_(schedule.unit)


class CapturedKivi(CapturedSlots):
    """The keys [quantised | residual] and the values [quantised | residual] of one layer, whole buffers."""

    def __init__(self, slots: Slots, keys: Side, values: Side) -> None:
        super().__init__(slots, keys.whole(), values.whole())
        self.sides = keys, values

    @property
    def packed(self) -> tuple[int, int]:
        keys, values = (side.groups.length for side in self.sides)
        return keys, values

    def device_counters(self, counters: Counters, seen: Tensor) -> DeviceCounters:
        return KiviCounters(counters, seen, self.packed, [side.schedule for side in self.sides])

    def write(self, device: DeviceCounters, slot: Tensor, key: Tensor, value: Tensor) -> None:
        assert isinstance(device, KiviCounters)
        for side, row, new in zip(self.sides, device.rows, (key, value), strict=True):
            side.residual.index_copy_(2, row, new)

    def settle(self, device: DeviceCounters) -> None:
        """Quantise the token that leaves a ring."""
        assert isinstance(device, KiviCounters)
        for side, quantised in zip(self.sides, device.quantised, strict=True):
            side.quantise_oldest(quantised)

    @property
    def flush_is_due(self) -> bool:
        return any(side.block_is_due for side in self.sides)

    def flush(self, device: DeviceCounters) -> None:
        """Quantise the residuals that hold a block of `residual_length` tokens."""
        assert isinstance(device, KiviCounters)
        for side, quantised in zip(self.sides, device.quantised, strict=True):
            side.quantise_block(quantised)

    def count(self) -> None:
        super().count()
        for side in self.sides:
            side.count()

    def count_flush(self) -> None:
        for side in self.sides:
            side.count_flush()
