"""Slots whose keys and values are rows of codes, each written by itself: for stores that keep rules may evict from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.codebook import CodedRows
from kvbench.cache.groups import Groups
from kvbench.cache.hadamard import hadamard
from kvbench.cache.slots import Buffer, CapturedSlots, Slots, SlotShape, scatter_rows
from kvbench.kernels.parts import Coded, Dense, Packed, Part, Sum


class Rows(Protocol):
    """Preallocated rows of one layer's keys or values. length: rows held."""

    length: int

    def append(self, rows: Tensor) -> None:
        """Encode rows [B, Hkv, n, D] behind those held."""

    def overwrite(self, slot: Tensor, rows: Tensor) -> None:
        """Encode rows [B, Hkv, q, D] into the slots [B, Hkv, q]."""

    def parts(self) -> Sequence[Part]:
        """The rows held."""

    def whole(self) -> Part:
        """All rows, held or not."""

    def buffers(self, kept: int) -> Iterator[Buffer]:
        """Every tensor, with the share in use when `kept` rows hold tokens."""


class FloatRows:
    """Rows [B, Hkv, S, D] of one float dtype. length: rows held. Numbers beyond its range become its largest."""

    def __init__(self, dtype: torch.dtype, width: int, shape: SlotShape) -> None:
        self.rows = torch.empty(shape.batch, shape.kv_heads, shape.slots, width, dtype=dtype, device=shape.device)
        self.length, self.largest = 0, torch.finfo(dtype).max

    def narrow(self, rows: Tensor) -> Tensor:
        """The rows as they are held."""
        return rows.clamp(-self.largest, self.largest).to(self.rows.dtype)

    def append(self, rows: Tensor) -> None:
        self.rows[:, :, self.length : self.length + rows.shape[2]] = self.narrow(rows)
        self.length += rows.shape[2]

    def overwrite(self, slot: Tensor, rows: Tensor) -> None:
        held, new = self.rows, self.narrow(rows)
        if held.dtype.itemsize == 1:  # torch cannot scatter 8-bit floats
            held, new = held.view(torch.uint8), new.view(torch.uint8)
        scatter_rows(held, slot, new)

    def parts(self) -> list[Dense]:
        return [self.whole().first(self.length)]

    def whole(self) -> Dense:
        return Dense(self.rows)

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield Buffer("codes" if self.rows.dtype.itemsize == 1 else "dense", self.rows, kept / self.rows.shape[2])


class CentredRows:
    """Rows held less their mean in the prompt, float32 [B, Hkv, 1, D], which is added when they are read."""

    def __init__(self, rows: "FloatRows | CodedRows | Groups", width: int, shape: SlotShape) -> None:
        self.rows = rows
        self.mean = torch.zeros(shape.batch, shape.kv_heads, 1, width, dtype=torch.float32, device=shape.device)

    @property
    def length(self) -> int:
        """Rows held."""
        return self.rows.length

    @length.setter
    def length(self, value: int) -> None:
        self.rows.length = value

    def fit(self, rows: Tensor) -> None:
        """Fix the mean by a prompt's rows [B, Hkv, n, D]."""
        self.mean.copy_(rows.to(torch.float32).mean(2, keepdim=True))

    def append(self, rows: Tensor) -> None:
        self.rows.append(rows - self.mean)

    def overwrite(self, slot: Tensor, rows: Tensor) -> None:
        self.rows.overwrite(slot, rows - self.mean)

    def parts(self) -> list[Sum]:
        return [self.sum_of(part) for part in self.rows.parts()]

    def whole(self) -> Sum:
        return self.sum_of(self.rows.whole())

    def sum_of(self, part: Dense | Packed | Coded) -> Sum:
        """A part's rows and their mean."""
        return Sum(part, (Dense(self.mean.expand(-1, -1, part.length, -1)),))

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.rows.buffers(kept)
        yield Buffer("scales", self.mean, 1.0)


@dataclass(frozen=True)
class Turn:
    """An orthogonal matrix on rows [..., D], and its inverse."""

    on: Callable[[Tensor], Tensor]
    off: Callable[[Tensor], Tensor]


def unturned(x: Tensor) -> Tensor:
    """x, where nothing is rotated."""
    return x


NO_TURN = Turn(unturned, unturned)
HADAMARD = Turn(hadamard, hadamard)  # the matrix is symmetric, its own inverse


class RowSlots(Slots):
    """Every slot's key and value in rows of their own.

    key_turn, value_turn: what rows are multiplied by before they are held. The query is multiplied likewise and the
    output back, so that q . k and the output are unchanged.
    """

    def __init__(
        self, keys: Rows, values: Rows, shape: SlotShape, key_turn: Turn = NO_TURN, value_turn: Turn = NO_TURN
    ) -> None:
        self.keys, self.values, self.wide = keys, values, torch.promote_types(shape.dtype, torch.float32)
        self.key_turn, self.value_turn = key_turn, value_turn

    def fill(self, key: Tensor, value: Tensor) -> None:
        self.fit(key, value)
        self.append(key, value)

    def fit(self, key: Tensor, value: Tensor) -> None:
        if isinstance(self.keys, CentredRows):
            self.keys.fit(self.key_turn.on(key))

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(self.key_turn.on(key))
        self.values.append(self.value_turn.on(value))
        self.length += key.shape[2]

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys.overwrite(slot, self.key_turn.on(key))
        self.values.overwrite(slot, self.value_turn.on(value))

    def transform_query(self, query: Tensor) -> Tensor:
        return self.key_turn.on(query)

    def restore_keys(self, key: Tensor) -> Tensor:
        return self.key_turn.off(key)

    def restore_output(self, output: Tensor) -> Tensor:
        return self.value_turn.off(output)

    @property
    def has_quantised(self) -> bool:
        return self.length > 0

    def key_parts(self) -> Sequence[Part]:
        return self.keys.parts()

    def value_parts(self) -> Sequence[Part]:
        return self.values.parts()

    def captured(self) -> CapturedSlots:
        return CapturedSlots(self, [self.keys.whole()], [self.values.whole()])

    def count(self) -> None:
        self.length += 1
        self.keys.length = self.values.length = self.length

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers(kept)
        yield from self.values.buffers(kept)
