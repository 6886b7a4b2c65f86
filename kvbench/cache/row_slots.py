"""Slots whose keys and values are rows of codes, each written by itself: for stores that keep rules may evict from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvbench.cache.hadamard import hadamard
from kvbench.cache.slots import Buffer, CapturedSlots, Slots
from kvbench.kernels.parts import Part


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

    def __init__(self, keys: Rows, values: Rows, key_turn: Turn = NO_TURN, value_turn: Turn = NO_TURN) -> None:
        self.keys, self.values = keys, values
        self.key_turn, self.value_turn = key_turn, value_turn

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(self.key_turn.on(key))
        self.values.append(self.value_turn.on(value))
        self.length += key.shape[2]

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys.overwrite(slot, self.key_turn.on(key))
        self.values.overwrite(slot, self.value_turn.on(value))

    def transform_query(self, query: Tensor) -> Tensor:
        return self.key_turn.on(query)

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
