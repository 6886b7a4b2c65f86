"""One layer's preallocated memory for keys and values, and the same memory for a captured decode step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.cache.counters import Counters, DeviceCounters
from kvbench.kernels.parts import Part, is_packed, read_all


@dataclass(frozen=True)
class SlotShape:
    """What a layer's slots are sized for.

    batch, kv_heads, key_dim (D), value_dim (Dv), slots (tokens held at most), step (most tokens in one forward).
    """

    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    slots: int
    step: int
    dtype: torch.dtype
    device: torch.device


class Buffer(NamedTuple):
    """One preallocated tensor, what it is for, and the share of it that holds tokens now."""

    part: str
    tensor: Tensor
    used: float


class CannotCapture(RuntimeError):
    """A cache, or a model, whose decode step cannot be captured in a CUDA graph; the message says why."""


class Slots:
    """One layer's preallocated memory for keys and values. Slots 0 .. length - 1 have been written.

    A subclass writes new tokens in `append` and may quantise in `settle`, which runs after the attention of the forward
    that brought them. `overwrite` replaces single slots where the store is `writable`.
    """

    length: int = 0
    wide: torch.dtype = torch.float32
    """What `read` returns: float64 for a float64 model."""
    position: Tensor
    """int32 [B, Hkv, S], the token in each slot: the layer's own, up to date before a key is written or read."""

    def fill(self, key: Tensor, value: Tensor) -> None:
        """Write kept tokens of a prompt, [B, Hkv, n, D] and [B, Hkv, n, Dv], to the slots that follow the last one.

        n may exceed the shape's `step`. A prompt that is read in chunks comes in several calls.
        """
        self.append(key, value)

    def fit(self, key: Tensor, value: Tensor) -> None:
        """Fix scales by a prompt's tokens, where the store has `static_scales`; shapes as in `fill`. Writes nothing."""

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write q tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv], to the slots that follow the last one."""
        raise TypeError(f"{type(self).__name__} cannot append")

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Write q tokens to the slots [B, Hkv, q], which need not be the same in every head."""
        raise TypeError(f"{type(self).__name__} cannot overwrite single slots")

    def settle(self) -> None:
        """After a forward: quantise tokens that leave the full-precision residual."""

    def transform_query(self, query: Tensor) -> Tensor:
        """The query [B, Hq, q, D] in the basis that the keys are held in."""
        return query

    def restore_output(self, output: Tensor) -> Tensor:
        """The output [B, Hq, q, Dv] in the model's basis, from the basis that the values are held in."""
        return output

    def restore_keys(self, key: Tensor) -> Tensor:
        """Keys [B, Hkv, n, D] in the model's basis, from the basis that they are held in."""
        if type(self).transform_query is not Slots.transform_query:
            raise TypeError(f"{type(self).__name__} defines `transform_query`; define `restore_keys` as well")
        return key

    def read(self, keys: Sequence[Part], values: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Keys and values of these parts in the model's basis: [B, Hkv, n, D] and [B, Hkv, n, Dv] of dtype `wide`."""
        return self.restore_keys(read_all(keys, self.wide)), self.restore_output(read_all(values, self.wide))

    def read_back(self) -> tuple[Tensor, Tensor]:
        """Keys and values of slots 0 .. length - 1 as `fill` takes them, from what is held: float32."""
        key, value = self.read(self.key_parts(), self.value_parts())
        return key.to(torch.float32), value.to(torch.float32)

    @property
    def has_quantised(self) -> bool:
        """Whether any token is held in fewer bits than the model's dtype."""
        return False

    def key_parts(self) -> Sequence[Part]:
        """The keys of slots 0 .. length - 1, in order."""
        raise TypeError(f"{type(self).__name__} has no keys")

    def value_parts(self) -> Sequence[Part]:
        """The values of slots 0 .. length - 1, in order."""
        raise TypeError(f"{type(self).__name__} has no values")

    def captured(self) -> "CapturedSlots":
        """The same memory for a step that is captured in a CUDA graph. Raises CannotCapture where there is no way."""
        raise CannotCapture(f"{type(self).__name__} counts on the host where it writes")

    def count(self) -> None:
        """Count a token that a captured step has written behind the last one."""
        self.length += 1

    def buffers(self, kept: int) -> Iterator[Buffer]:
        """Every tensor held, with the share in use when `kept` slots hold tokens."""
        raise TypeError(f"{type(self).__name__} has no buffers")


class CapturedSlots:
    """A layer's slots for a captured step: the same memory, written at places that tensors on the device name.

    This class is for stores whose single slots can be overwritten. keys, values: parts that span whole buffers.
    """

    def __init__(self, slots: Slots, keys: Sequence[Part], values: Sequence[Part]) -> None:
        self.slots, self.keys, self.values = slots, keys, values
        self.packs = is_packed(keys[0]), is_packed(values[0])

    def key_parts(self) -> Sequence[Part]:
        """The keys of all slots, written or not."""
        return self.keys

    def value_parts(self) -> Sequence[Part]:
        """The values of all slots, written or not."""
        return self.values

    @property
    def packed(self) -> tuple[int, int]:
        """Slots whose keys, and whose values, are quantised, on the host's count."""
        keys, values = (self.slots.length if packed else 0 for packed in self.packs)
        return keys, values

    def device_counters(self, counters: Counters, seen: Tensor) -> DeviceCounters:
        """New counters on the device that begin where the host's `counters` are; seen: int64 []."""
        return DeviceCounters(counters, seen, self.packed, self.packs)

    def prepare(self) -> None:
        """On the host, before a step whose token goes behind the last one: make its slot usable."""

    def write(self, device: DeviceCounters, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one token, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], to the slots [B, Hkv, 1]."""
        self.slots.overwrite(slot, key, value)

    def settle(self, device: DeviceCounters) -> None:
        """After the attention of each step: quantise the token that leaves a full-precision residual."""

    @property
    def flush_is_due(self) -> bool:
        """Whether `flush` has to run before the next step, on the host's count."""
        return False

    def flush(self, device: DeviceCounters) -> None:
        """Quantise a block of a full-precision residual; `device.flush` follows."""

    def count(self) -> None:
        """Count on the host a token that a step has written behind the last one."""
        self.slots.count()

    def count_flush(self) -> None:
        """Count on the host a block that `flush` has quantised."""


def scatter_rows(buffer: Tensor, slot: Tensor, rows: Tensor) -> None:
    """buffer[b, h, slot[b, h, i]] = rows[b, h, i]: buffer [B, Hkv, S, ...], slot [B, Hkv, q], rows [B, Hkv, q, ...]."""
    index = slot.reshape(*slot.shape, *([1] * (rows.ndim - 3))).expand_as(rows)
    buffer.scatter_(2, index, rows.to(buffer.dtype))
