"""TurboQuant: a random rotation, one norm per vector, and a codebook for normally distributed numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvbench.cache.codebook import CodedRows, codebook_bytes, packed_together
from kvbench.cache.groups import check_groups
from kvbench.cache.hadamard import hadamard
from kvbench.cache.store import Buffer, CapturedSlots, Slots, SlotShape, Store
from kvbench.kernels.parts import Part

WIDTHS = (4, 3)


@dataclass(frozen=True)
class Turbo(Store):
    """TurboQuant (Zandieh et al., 2025, arXiv:2504.19874), the variant that minimises the mean squared error.

    A key or value x of D channels is rotated at random (random signs, then a Hadamard matrix). Each coordinate of
    sqrt(D) x / |x| is then close to a standard normal number for any x. It is held as the index of the nearest level of
    the Lloyd-Max codebook for standard normal numbers, and |x| / sqrt(D) is held in 16 bits. Groups have no scale or
    minimum. Bits per value: bits + 16 / D, and the codebooks once a layer (248 bytes
    for 4 bits). Single slots can be overwritten.
    """

    k_bits: int = 4
    v_bits: int = 4

    def __post_init__(self) -> None:
        check_groups("turbo", 32, self.k_bits, self.v_bits, widths=WIDTHS)

    def check(self, key_dim: int, value_dim: int) -> None:
        for width in (key_dim, value_dim):
            check_groups("turbo", packed_together(width), head_dim=width)

    def allocate(self, shape: SlotShape) -> "TurboSlots":
        return TurboSlots(self, shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        bits = self.k_bits * shape.key_dim + self.v_bits * shape.value_dim
        rows = shape.batch * shape.kv_heads * shape.slots * (bits // 8 + 2 * 2)
        return rows + codebook_bytes(self.k_bits) + codebook_bytes(self.v_bits)


class TurboSlots(Slots):
    """Codes and norms of every slot's key and value."""

    def __init__(self, store: Turbo, shape: SlotShape) -> None:
        self.keys = CodedRows(store.k_bits, shape.key_dim, shape)
        self.values = CodedRows(store.v_bits, shape.value_dim, shape)

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.write(self.length, turn(key))
        self.values.write(self.length, turn(value))
        self.length += key.shape[2]

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys.overwrite(slot, turn(key))
        self.values.overwrite(slot, turn(value))

    def transform_query(self, query: Tensor) -> Tensor:
        return turn(query)

    def restore_keys(self, key: Tensor) -> Tensor:
        return turn_back(key)

    def restore_output(self, output: Tensor) -> Tensor:
        return turn_back(output)

    @property
    def has_quantised(self) -> bool:
        return self.length > 0

    def key_parts(self) -> Sequence[Part]:
        return [self.keys.part(self.length)]

    def value_parts(self) -> Sequence[Part]:
        return [self.values.part(self.length)]

    def captured(self) -> CapturedSlots:
        slots = self.keys.codes.shape[2]
        return CapturedSlots(self, [self.keys.part(slots)], [self.values.part(slots)])

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers(kept)
        yield from self.values.buffers(kept)


def turn(x: Tensor) -> Tensor:
    """x [..., D] after random signs and a Hadamard matrix: orthogonal, so that q . k is unchanged."""
    return hadamard(x * signs(x.shape[-1], x.dtype, x.device))


def turn_back(x: Tensor) -> Tensor:
    """The inverse of `turn`."""
    return hadamard(x) * signs(x.shape[-1], x.dtype, x.device)


@lru_cache(maxsize=16)
def signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """+1 or -1 for each channel, always the same."""
    ones = torch.randint(2, (width,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return ones.to(device, dtype)
