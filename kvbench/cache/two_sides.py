"""Slots whose keys and values are two sides of one kind, each with a full-precision residual."""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from kvbench.cache.slots import Buffer, Slots
from kvbench.kernels.parts import Part


class RowsWithResidual(Protocol):
    """The keys or the values of a layer, the newest of them in a residual."""

    def fill(self, rows: Tensor) -> None: ...

    def append(self, rows: Tensor) -> None: ...

    def settle(self) -> None: ...

    def parts(self) -> Sequence[Part]: ...

    def buffers(self) -> Iterator[Buffer]: ...


Rows = TypeVar("Rows", bound=RowsWithResidual)
"""How one layer's keys, and its values, are held."""


class TwoSides(Slots, Generic[Rows]):
    """The keys and the values of one layer, each with a residual of its own."""

    keys: Rows
    values: Rows

    def fill(self, key: Tensor, value: Tensor) -> None:
        self.keys.fill(key)
        self.values.fill(value)
        self.length += key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.length += key.shape[2]

    def settle(self) -> None:
        self.keys.settle()
        self.values.settle()

    def key_parts(self) -> Sequence[Part]:
        return self.keys.parts()

    def value_parts(self) -> Sequence[Part]:
        return self.values.parts()

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers()
        yield from self.values.buffers()
