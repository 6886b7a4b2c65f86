"""Keys and values as coordinates in a basis. Keys are held before their rotary embedding and rebuilt in every step."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.counters import DeviceCounters
from kvbench.cache.rotary import KeyRotation
from kvbench.cache.slots import Buffer, CapturedSlots, Slots, SlotShape
from kvbench.cache.store import Store
from kvbench.kernels.parts import Dense, Part, read_all


@dataclass(frozen=True)
class Coordinates(Store):
    """The store of one layer. codes: the store of the coordinates. keys [Hkv, D, r] and values [Hkv, Dv, r']:
    orthonormal columns, in float32 or float64. rotation: the layer's rotary embedding, None where it has none.
    """

    codes: Store
    keys: Tensor
    values: Tensor
    rotation: KeyRotation | None

    def check(self, key_dim: int, value_dim: int) -> None:
        self.codes.check(self.keys.shape[-1], self.values.shape[-1])

    def allocate(self, shape: SlotShape) -> "CoordinateSlots":
        return CoordinateSlots(self, shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        bases = sum(basis.numel() * basis.element_size() for basis in (self.keys, self.values))
        return self.codes.planned_bytes(self.narrowed(shape)) + bases

    def narrowed(self, shape: SlotShape) -> SlotShape:
        """The shape of the slots that hold coordinates."""
        return replace(shape, key_dim=self.keys.shape[-1], value_dim=self.values.shape[-1])


class CoordinateSlots(Slots):
    """Coordinates of every slot's key and value."""

    def __init__(self, store: Coordinates, shape: SlotShape) -> None:
        self.codes = store.codes.allocate(store.narrowed(shape))
        self.keys, self.values, self.rotation = store.keys, store.values, store.rotation

    def append(self, key: Tensor, value: Tensor) -> None:
        start = self.codes.length
        self.codes.append(*self._coordinates(key, value, self.position[..., start : start + key.shape[2]]))
        self.length = self.codes.length

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.codes.overwrite(slot, *self._coordinates(key, value, self.position.gather(-1, slot)))

    def _coordinates(self, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """key [B, Hkv, q, D] for positions [B, Hkv, q] and value [B, Hkv, q, Dv], each in its basis."""
        before = key if self.rotation is None else self.rotation.take_off(key, position)
        return before.to(self.keys.dtype) @ self.keys, value.to(self.values.dtype) @ self.values

    def settle(self) -> None:
        self.codes.settle()

    @property
    def has_quantised(self) -> bool:
        is_cut = any(basis.shape[-1] < basis.shape[-2] for basis in (self.keys, self.values))
        return self.length > 0 and (is_cut or self.codes.has_quantised)

    def key_parts(self) -> Sequence[Part]:
        return [self.rebuilt(self.codes.key_parts())]

    def rebuilt(self, coordinates: Sequence[Part]) -> Dense:
        """The keys of the first slots from their coordinates, each rotated for its position."""
        keys = read_all(coordinates, self.keys.dtype) @ self.keys.mT
        if self.rotation is None:
            return Dense(keys)
        return Dense(self.rotation.put_on(keys, self.position[..., : keys.shape[2]]))

    def value_parts(self) -> Sequence[Part]:
        return self.codes.value_parts()

    def restore_output(self, output: Tensor) -> Tensor:
        heads = output.unflatten(1, (self.values.shape[0], -1)).to(self.values.dtype)  # [B, Hkv, Hq/Hkv, q, r]
        return torch.einsum("bhgqr,hdr->bhgqd", heads, self.values).flatten(1, 2).to(output.dtype)

    def captured(self) -> CapturedSlots:
        return CapturedCoordinates(self)

    def count(self) -> None:
        self.codes.count()
        self.length = self.codes.length

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.codes.buffers(kept)
        yield Buffer("basis", self.keys, 1.0)
        yield Buffer("basis", self.values, 1.0)


class CapturedCoordinates(CapturedSlots):
    """The captured form of `CoordinateSlots`. Every step rebuilds the keys from all coordinates; angles are computed
    and not looked up, since no table is long enough for all steps to come."""

    def __init__(self, slots: CoordinateSlots) -> None:
        codes = slots.codes.captured()
        super().__init__(slots, codes.keys, codes.values)
        self.packs = False, codes.packs[1]
        self.whole = copy(slots)
        self.whole.rotation = None if slots.rotation is None else slots.rotation.without_table()

    def key_parts(self) -> Sequence[Part]:
        return [self.whole.rebuilt(self.keys)]

    def write(self, device: DeviceCounters, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.whole.overwrite(slot, key, value)
