"""Memory layouts that kernels read: the keys, and the values, of a store are a sequence of parts in slot order.

KIVI's keys are one packed part and one dense part; its values are split at another slot. A kernel reads the key parts
for the scores and the value parts for the output, so no store is ever unpacked as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kernels.rows import Axis, Coded, Dense, Packed, take

__all__ = [
    "Axis",
    "Coded",
    "Dense",
    "LowRank",
    "Narrow",
    "Packed",
    "Paged",
    "Part",
    "Parts",
    "Sparse",
    "Split",
    "Sum",
    "head_dim",
    "is_packed",
    "read_all",
    "take",
    "total_length",
]


@dataclass(frozen=True)
class Split:
    """Rows whose first and last channels are two parts: MLA's latent, and its rotated key in another format.

    [B, Hkv, n, D1 + D2] once read, from two parts of the same n rows.
    """

    first_channels: Dense | Packed
    last_channels: Dense

    @property
    def length(self) -> int:
        return self.first_channels.length

    @property
    def kv_heads(self) -> int:
        return self.first_channels.kv_heads

    def read(self, dtype: torch.dtype) -> Tensor:
        """The rows as `dtype`: [B, Hkv, n, D1 + D2]."""
        return torch.cat([self.first_channels.read(dtype), self.last_channels.read(dtype)], dim=-1)

    def first(self, n: int) -> "Split":
        """The part's first n rows."""
        return Split(self.first_channels.first(n), self.last_channels.first(n))


@dataclass(frozen=True)
class Narrow:
    """Rows of which only some channels are held, the others are 0. Only the reference reads it.

    rows [B, Hkv, n, r] in a float dtype; channels int64 [B, Hkv, r], which of the `width` channels they are.
    """

    rows: Tensor
    channels: Tensor
    width: int

    @property
    def length(self) -> int:
        return self.rows.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.rows.shape[1]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The rows with all channels: [B, Hkv, n, D]."""
        whole = self.rows.new_zeros(*self.rows.shape[:3], self.width, dtype=dtype)
        return whole.scatter_(-1, self.channels.unsqueeze(2).expand_as(self.rows), self.rows.to(dtype))

    def first(self, n: int) -> "Narrow":
        """The part's first n rows."""
        return replace(self, rows=self.rows[:, :, :n])


@dataclass(frozen=True)
class LowRank:
    """Rows that are products: left [B, Hkv, blocks, n, r] @ right [B, Hkv, blocks, r, D]. Added in a `Sum`."""

    left: Tensor
    right: Tensor

    @property
    def length(self) -> int:
        return self.left.shape[2] * self.left.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.left.shape[1]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The rows: [B, Hkv, blocks x n, D]."""
        return (self.left.to(dtype) @ self.right.to(dtype)).flatten(2, 3)


@dataclass(frozen=True)
class Sparse:
    """Rows of which few numbers are not 0. Added in a `Sum`.

    axis "token":   numbers and places [B, Hkv, blocks, D, m], places among the `size` tokens of a block
    axis "channel": numbers and places [B, Hkv, blocks, n, m], places among the `size` channels
    """

    numbers: Tensor
    places: Tensor
    size: int
    axis: Axis

    @property
    def length(self) -> int:
        return self.numbers.shape[2] * (self.size if self.axis == "token" else self.numbers.shape[3])

    @property
    def kv_heads(self) -> int:
        return self.numbers.shape[1]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The rows: [B, Hkv, n, D]."""
        zeros = self.numbers.new_zeros(*self.numbers.shape[:4], self.size, dtype=dtype)
        lines = zeros.scatter_(-1, self.places.long(), self.numbers.to(dtype))
        return (lines.mT if self.axis == "token" else lines).flatten(2, 3)


@dataclass(frozen=True)
class Sum:
    """Rows, and what is added to them: other parts of the same n rows. Only the reference reads it."""

    rows: Dense | Packed | Coded
    added: tuple[Dense | LowRank | Sparse, ...]

    @property
    def length(self) -> int:
        return self.rows.length

    @property
    def kv_heads(self) -> int:
        return self.rows.kv_heads

    def read(self, dtype: torch.dtype) -> Tensor:
        """The summed rows: [B, Hkv, n, D]."""
        total = self.rows.read(dtype)
        for part in self.added:
            total = total + part.read(dtype)
        return total

    def first(self, n: int) -> Dense:
        """The part's first n rows."""
        return Dense(self.read(torch.float32)[:, :, :n])

    def at(self, index: Tensor) -> "Sum":
        """The rows index [B, Hkv, n], copied; only dense rows may be added."""
        added = [part for part in self.added if isinstance(part, Dense)]
        if len(added) < len(self.added):
            raise TypeError("rows of blocks cannot be read one by one")
        return Sum(self.rows.at(index), tuple(part.at(index) for part in added))


@dataclass(frozen=True)
class Paged:
    """Blocks of a pool: each batch row and KV head holds as many as it needs. It is the only part of its store.

    pool: the rows of all blocks in order, with the leading sizes [1, 1] where any head may hold any block, [1, Hkv]
    where all heads share their blocks. table: int32 [B, 1 or Hkv, n], the block of slots i * block_size and following;
    after a head's last slot its entries are any valid blocks. lengths: int64 [B, Hkv], slots of each head, None where
    all have `length`. length: the largest of them, on the host.
    """

    pool: Dense | Packed | Coded | Sum
    table: Tensor
    lengths: Tensor | None
    length: int
    block_size: int

    @property
    def kv_heads(self) -> int:
        return max(self.pool.kv_heads, self.table.shape[1])

    def index(self) -> Tensor:
        """Where slots 0 .. length - 1 lie in the pool: int64 [B, 1 or Hkv, length]."""
        return block_rows(self.table, self.block_size)[..., : self.length]

    def missing(self) -> Tensor | None:
        """bool [B, Hkv, length]: slots that a head does not have; None where all have all."""
        if self.lengths is None:
            return None
        return torch.arange(self.length, device=self.table.device) >= self.lengths.unsqueeze(-1)

    def read(self, dtype: torch.dtype) -> Tensor:
        """The rows, gathered: [B, Hkv, length, D]; rows that a head does not have hold arbitrary finite numbers."""
        return self.pool.at(self.index()).read(dtype)

    def first(self, n: int) -> "Paged":
        """The part's first n rows."""
        return Paged(self.pool, self.table, self.lengths, n, self.block_size)


def block_rows(table: Tensor, block_size: int) -> Tensor:
    """The rows of blocks [..., n] in order: int64 [..., n * block_size]."""
    first = table.long().unsqueeze(-1) * block_size
    return (first + torch.arange(block_size, device=table.device)).flatten(-2)


Part = Dense | Packed | Coded | Split | Narrow | Sum | Paged
Parts = Sequence[Part]
"""Keys or values of one store, in slot order."""


def head_dim(part: Part) -> int:
    """Channels of a head: D or Dv."""
    if isinstance(part, Split):
        return head_dim(part.first_channels) + head_dim(part.last_channels)
    if isinstance(part, Paged | Sum):
        return head_dim(part.pool if isinstance(part, Paged) else part.rows)
    if isinstance(part, Narrow):
        return part.width
    if isinstance(part, Dense):
        return part.rows.shape[3]
    return part.codes.shape[3] * (1 if isinstance(part, Packed) and part.axis == "token" else part.group_size)


def is_packed(part: Part) -> bool:
    """Whether a part's rows are codes, or their first channels are, or the rows that something is added to."""
    if isinstance(part, Sum):
        return is_packed(part.rows)
    return isinstance(part.first_channels if isinstance(part, Split) else part, Packed | Coded)


def total_length(parts: Sequence[Part]) -> int:
    """Slots that the parts cover together."""
    return sum(part.length for part in parts)


def read_all(parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
    """All rows in slot order: [B, Hkv, S, D]. For references and tests; kernels read part by part."""
    return torch.cat([part.read(dtype) for part in parts], dim=-2)
