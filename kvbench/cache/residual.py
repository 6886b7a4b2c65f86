"""Quantised rows with a full-precision residual behind them: KIVI's keys and values, on either axis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.cache.groups import Groups, planned_groups
from kvbench.cache.slots import Buffer, SlotShape
from kvbench.kernels.parts import Dense, Part

Number = TypeVar("Number", int, Tensor)
"""A count on the host, or an integer tensor on the device."""


@dataclass(frozen=True)
class Schedule:
    """When tokens leave a residual of `residual_length` tokens (R), and where in the residual a token stands.

    ring: rows of a residual from which tokens leave one by one, the oldest first. None: R tokens leave together, and
    the residual begins behind the quantised tokens. Counts may be numbers on the host or tensors on the device.
    """

    residual_length: int
    ring: int | None = None

    @property
    def unit(self) -> int:
        """Tokens that are quantised together."""
        return self.residual_length if self.ring is None else 1

    def row(self, token: Number, quantised: Number) -> Number:
        """The row of the residual where token number `token` stands, `quantised` tokens being quantised."""
        return token - quantised if self.ring is None else token % self.ring

    def is_due(self, length: int | Tensor, quantised: int | Tensor) -> bool | Tensor:
        """Whether `unit` tokens have to be quantised, of `length` tokens of which `quantised` are already."""
        held = length - quantised
        return held >= self.residual_length if self.ring is None else held > self.residual_length


class LeftRows(Protocol):
    """Rows that have left a residual. length: rows held."""

    @property
    def length(self) -> int: ...

    def append(self, rows: Tensor) -> None: ...

    def parts(self) -> Sequence[Part]: ...

    def buffers(self) -> Iterator[Buffer]: ...


class HeldRows(LeftRows, Protocol):
    """Rows that have left a residual, which a captured step can write one by one. capacity: most rows."""

    length: int

    @property
    def capacity(self) -> int: ...

    def put(self, index: Tensor, rows: Tensor) -> None: ...

    def whole(self) -> Part: ...


Left = TypeVar("Left", bound=LeftRows)
"""How rows are held that have left a residual."""


class WholeBlocks(Generic[Left]):
    """Blocks of `residual_length` R tokens in `groups`, the tokens behind them in full precision.

    After `settle` the residual holds fewer than R tokens. length: tokens held, quantised or not.
    """

    def __init__(self, groups: Left, residual_length: int, width: int, shape: SlotShape) -> None:
        self.residual_length, self.length = residual_length, 0
        self.groups = groups
        self.schedule = Schedule(residual_length)
        self.residual = residual_rows(residual_length, width, shape)

    def fill(self, rows: Tensor) -> None:
        """Take a prompt's rows [B, Hkv, n, D], or its next ones."""
        rows = torch.cat([self.residual[:, :, : self.length - self.groups.length], rows], dim=2)
        whole = rows.shape[2] // self.residual_length * self.residual_length
        self.groups.append(rows[:, :, :whole])
        self.residual[:, :, : rows.shape[2] - whole] = rows[:, :, whole:]
        self.length = self.groups.length + rows.shape[2] - whole

    def append(self, rows: Tensor) -> None:
        """Write rows [B, Hkv, q, D] behind those held, in full precision."""
        first = self.schedule.row(self.length, self.groups.length)
        self.residual[:, :, first : first + rows.shape[2]] = rows
        self.length += rows.shape[2]

    def settle(self) -> None:
        """While the residual holds at least R tokens, quantise its oldest R."""
        r = self.residual_length
        while self.block_is_due:
            self.groups.append(self.residual[:, :, :r])
            rest = self.length - self.groups.length
            self.residual[:, :, :rest] = self.residual[:, :, r : r + rest].clone()

    @property
    def block_is_due(self) -> bool:
        """Whether the residual holds R tokens, on the host's count."""
        return bool(self.schedule.is_due(self.length, self.groups.length))

    def parts(self) -> Sequence[Part]:
        rest = self.length - self.groups.length
        return [*self.groups.parts(), *([Dense(self.residual[:, :, :rest])] if rest else [])]

    def buffers(self) -> Iterator[Buffer]:
        yield from self.groups.buffers()
        yield Buffer("residual", self.residual, (self.length - self.groups.length) / self.residual.shape[2])


class PerChannel(WholeBlocks[Groups]):
    """Groups of consecutive tokens, one scale a channel; `residual_length` R tokens are quantised at a time."""

    def __init__(self, bits: int, group_size: int, residual_length: int, width: int, shape: SlotShape) -> None:
        rows = shape.slots // residual_length * residual_length
        super().__init__(Groups("token", bits, group_size, rows, width, shape), residual_length, width, shape)

    def whole(self) -> Sequence[Part]:
        """All of both buffers, written or not."""
        return [self.groups.whole(), Dense(self.residual)]

    def quantise_oldest(self, packed: Tensor) -> None:
        """Do nothing: no token leaves this residual by itself."""

    def quantise_block(self, packed: Tensor) -> None:
        """Quantise the residual's R tokens on the device; packed: int32 [1], tokens quantised before them."""
        size = self.groups.group_size
        blocks = torch.arange(self.residual_length // size, device=packed.device)
        self.groups.put(packed.long() // size + blocks, self.residual[:, :, : self.residual_length])

    def count(self) -> None:
        """Count on the host a token that a captured step has written."""
        self.length += 1

    def count_flush(self) -> None:
        """Count on the host the R tokens that `quantise_block` has quantised, where they were due."""
        if self.block_is_due:
            self.groups.length += self.schedule.unit

    @staticmethod
    def planned_bytes(bits: int, group_size: int, residual_length: int, width: int, shape: SlotShape) -> int:
        """Bytes of the buffers, by formula."""
        rows = shape.slots // residual_length * residual_length
        return planned_groups(bits, group_size, rows, width, shape) + planned_residual(residual_length, width, shape)


class NewestWhole:
    """The newest `residual_length` tokens in full precision, all others in `groups`.

    The residual is a ring: token t stands in row t modulo its size. length: tokens held, quantised or not.
    """

    def __init__(self, groups: HeldRows, residual_length: int, width: int, shape: SlotShape) -> None:
        self.residual_length, self.length = residual_length, 0
        self.groups = groups
        self.residual = residual_rows(residual_length, width, shape)
        self.schedule = Schedule(residual_length, ring=self.residual.shape[2])

    def fill(self, rows: Tensor) -> None:
        """Take a prompt's rows [B, Hkv, n, D], or its next ones."""
        rows = torch.cat([*self._ring(), rows], dim=2)
        older = max(0, rows.shape[2] - self.residual_length)
        self.groups.append(rows[:, :, :older])
        self.length = self.groups.length
        self.append(rows[:, :, older:])

    def append(self, rows: Tensor) -> None:
        """Write rows [B, Hkv, q, D] behind those held, in full precision."""
        size = self.residual.shape[2]
        at = self.schedule.row(self.length, self.groups.length)
        head = min(rows.shape[2], size - at)
        self.residual[:, :, at : at + head] = rows[:, :, :head]
        self.residual[:, :, : rows.shape[2] - head] = rows[:, :, head:]
        self.length += rows.shape[2]

    def settle(self) -> None:
        """Quantise all but the newest R tokens."""
        while self.schedule.is_due(self.length, self.groups.length):
            oldest = self._ring()[0]
            leaving = self.length - self.groups.length - self.residual_length
            self.groups.append(oldest[:, :, : min(leaving, oldest.shape[2])])

    def whole(self) -> Sequence[Part]:
        """All of both buffers, written or not."""
        return [self.groups.whole(), Dense(self.residual, is_ring=True)]

    def quantise_oldest(self, packed: Tensor) -> None:
        """Quantise on the device the token that leaves the ring; packed: int32 [1], tokens quantised before it.

        While the ring is not full yet, this quantises row 0 again and again. No count includes it, so nothing reads it.
        """
        if self.groups.capacity:
            leaving = packed.long()
            self.groups.put(leaving, self.residual.index_select(2, self.schedule.row(leaving, leaving)))

    def quantise_block(self, packed: Tensor) -> None:
        """Do nothing: no tokens are quantised in blocks."""

    block_is_due = False

    def count(self) -> None:
        """Count on the host a token that a captured step has written, and the token that left a full ring."""
        self.length += 1
        if self.schedule.is_due(self.length, self.groups.length):
            self.groups.length += self.schedule.unit

    def count_flush(self) -> None:
        """Do nothing: no tokens are quantised in blocks."""

    def parts(self) -> Sequence[Part]:
        return [*self.groups.parts(), *(Dense(rows) for rows in self._ring())]

    def _ring(self) -> list[Tensor]:
        """The unquantised rows, oldest first: one slice of the ring, or two where it wraps."""
        size, held = self.residual.shape[2], self.length - self.groups.length
        at = self.schedule.row(self.groups.length, self.groups.length)
        head = min(held, size - at)
        slices = [self.residual[:, :, at : at + head], self.residual[:, :, : held - head]]
        return [rows for rows in slices if rows.shape[2]]

    def buffers(self) -> Iterator[Buffer]:
        yield from self.groups.buffers()
        yield Buffer("residual", self.residual, (self.length - self.groups.length) / self.residual.shape[2])


class PerToken(NewestWhole):
    """Groups of consecutive channels within a token; all but the newest `residual_length` tokens are quantised."""

    def __init__(self, bits: int, group_size: int, residual_length: int, width: int, shape: SlotShape) -> None:
        rows = max(0, shape.slots - residual_length)
        super().__init__(Groups("channel", bits, group_size, rows, width, shape), residual_length, width, shape)

    @staticmethod
    def planned_bytes(bits: int, group_size: int, residual_length: int, width: int, shape: SlotShape) -> int:
        """Bytes of the buffers, by formula."""
        rows = max(0, shape.slots - residual_length)
        return planned_groups(bits, group_size, rows, width, shape) + planned_residual(residual_length, width, shape)


Side = PerChannel | PerToken
"""The keys or the values of a layer."""


def residual_rows(residual_length: int, width: int, shape: SlotShape) -> Tensor:
    """Room for the residual and one forward's tokens, [B, Hkv, rows, D], but not for more than will ever come."""
    rows = min(residual_length + shape.step, shape.slots)
    return torch.empty(shape.batch, shape.kv_heads, rows, width, dtype=shape.dtype, device=shape.device)


def planned_residual(residual_length: int, width: int, shape: SlotShape) -> int:
    """Bytes of `residual_rows`."""
    rows = min(residual_length + shape.step, shape.slots)
    return shape.batch * shape.kv_heads * rows * width * shape.dtype.itemsize
