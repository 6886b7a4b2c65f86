"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.cache.groups import Groups, check_groups
from kvbench.cache.rule import is_whole
from kvbench.cache.store import Buffer, Slots, SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels.parts import Dense, Part


@dataclass(frozen=True)
class Kivi(Store):
    """KIVI (Liu et al., 2024, arXiv:2402.02750).

    Keys, after rotary embedding: groups of `group_size` consecutive tokens, one scale per channel; quantised
    `residual_length` tokens at a time, once that many are in the residual. Values: groups of `group_size` channels
    within a token; all but the newest `residual_length` are quantised. What is quantised is never quantised again.
    Bits a value: bits + 32 / group_size.
    """

    k_bits: int = 4
    v_bits: int = 4
    group_size: int = 32
    residual_length: int = 128

    writable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_groups("KIVI", self.group_size, self.k_bits, self.v_bits)
        if not is_whole(self.residual_length) or self.residual_length < 1 or self.residual_length % self.group_size:
            raise UserError(
                f"residual={self.residual_length} is not a multiple of group={self.group_size}; "
                f"type residual={4 * self.group_size}, for example"
            )

    def check(self, key_dim: int, value_dim: int) -> None:
        check_groups("KIVI", self.group_size, self.v_bits, head_dim=value_dim)

    def allocate(self, shape: SlotShape) -> "KiviSlots":
        return KiviSlots(self, shape)


class KiviSlots(Slots):
    """The keys [quantised | residual] and the values [quantised | residual ring] of one layer."""

    def __init__(self, store: Kivi, shape: SlotShape) -> None:
        self.residual_length = r = store.residual_length
        self.keys = Groups("token", store.k_bits, store.group_size, shape.slots // r * r, shape.key_dim, shape)
        self.values = Groups("channel", store.v_bits, store.group_size, max(0, shape.slots - r), shape.value_dim, shape)
        lead = (shape.batch, shape.kv_heads)
        rows = min(r + shape.step, shape.slots)
        self.key_residual = torch.empty(*lead, rows, shape.key_dim, dtype=shape.dtype, device=shape.device)
        self.value_ring = torch.empty(*lead, rows, shape.value_dim, dtype=shape.dtype, device=shape.device)

    def fill(self, key: Tensor, value: Tensor) -> None:
        n, r = key.shape[2], self.residual_length
        k, v = n - n % r, max(0, n - r)
        self.keys.append(key[:, :, :k])
        self.values.append(value[:, :, :v])
        self.length = n
        self.key_residual[:, :, : n - k] = key[:, :, k:]
        self._write_ring(v, value[:, :, v:])

    def append(self, key: Tensor, value: Tensor) -> None:
        first = self.length - self.keys.length
        self.key_residual[:, :, first : first + key.shape[2]] = key
        self._write_ring(self.length, value)
        self.length += key.shape[2]

    def settle(self) -> None:
        r = self.residual_length
        while self.length - self.keys.length >= r:
            self.keys.append(self.key_residual[:, :, :r])
            rest = self.length - self.keys.length
            self.key_residual[:, :, :rest] = self.key_residual[:, :, r : r + rest].clone()
        while (leaving := self.length - r - self.values.length) > 0:
            oldest = self._ring()[0]
            self.values.append(oldest[:, :, : min(leaving, oldest.shape[2])])

    @property
    def has_quantised(self) -> bool:
        return self.keys.length > 0 or self.values.length > 0

    def key_parts(self) -> Sequence[Part]:
        rest = self.length - self.keys.length
        dense = [Dense(self.key_residual[:, :, :rest])] if rest else []
        return [*self.keys.parts(), *dense]

    def value_parts(self) -> Sequence[Part]:
        return [*self.values.parts(), *(Dense(rows) for rows in self._ring())]

    def _write_ring(self, first: int, rows: Tensor) -> None:
        """Put the values of tokens first, first + 1, ... where a ring holds them: token t in row t modulo its size."""
        size = self.value_ring.shape[2]
        at = first % size
        head = min(rows.shape[2], size - at)
        self.value_ring[:, :, at : at + head] = rows[:, :, :head]
        self.value_ring[:, :, : rows.shape[2] - head] = rows[:, :, head:]

    def _ring(self) -> list[Tensor]:
        """The unquantised values, oldest first: one slice of the ring, or two where it wraps."""
        size, held = self.value_ring.shape[2], self.length - self.values.length
        at = self.values.length % size
        head = min(held, size - at)
        slices = [self.value_ring[:, :, at : at + head], self.value_ring[:, :, : held - head]]
        return [rows for rows in slices if rows.shape[2]]

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers()
        yield from self.values.buffers()
        rows = self.key_residual.shape[2]
        yield Buffer("residual", self.key_residual, (self.length - self.keys.length) / rows)
        yield Buffer("residual", self.value_ring, (self.length - self.values.length) / rows)
