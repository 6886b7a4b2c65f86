"""Memory layouts that kernels read: the keys, and the values, of a store are a sequence of parts in slot order.

KIVI's keys are one packed part and one dense part; its values are split at another slot. A kernel reads the key parts
for the scores and the value parts for the output, so no store is ever unpacked as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.quantise import dequantise, unpack

Axis = Literal["token", "channel"]
"""A group holds consecutive tokens of one channel ("token"), or consecutive channels of one token ("channel")."""


@dataclass(frozen=True)
class Dense:
    """Rows in a float dtype of 8 to 64 bits: [B, Hkv, n, D].

    is_ring: for a buffer whose length is on the device: slot i is in row i modulo n; else the first row is the first
    slot after the packed ones.
    """

    rows: Tensor
    is_ring: bool = False

    @property
    def length(self) -> int:
        return self.rows.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.rows.shape[1]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The rows as `dtype`: [B, Hkv, n, D]."""
        return self.rows.to(dtype)

    def first(self, n: int) -> "Dense":
        """The part's first n rows."""
        return Dense(self.rows[..., :n, :])

    def at(self, index: Tensor) -> "Dense":
        """The rows index [B, Hkv, n], copied; a part with one row or one head serves all of them."""
        return Dense(take(self.rows, index))


@dataclass(frozen=True)
class Packed:
    """Groups of `group_size` codes with a float16 scale and minimum each.

    minimum: None where codes are centred: the minimum is then -2^(bits - 1) times the scale, and nothing is held.

    axis "token":   codes [B, Hkv, n / G, D, G * bits / 8], pairs [B, Hkv, n / G, D]
    axis "channel": codes [B, Hkv, n, D / G, G * bits / 8], pairs [B, Hkv, n, D / G]
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    bits: int
    group_size: int
    axis: Axis

    @property
    def length(self) -> int:
        n = self.codes.shape[2]
        return n * self.group_size if self.axis == "token" else n

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[1]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The dequantised rows: [B, Hkv, n, D]."""
        values = dequantise(unpack(self.codes, self.bits), self.scale, self._minima(), dtype)
        return values.transpose(-1, -2).flatten(2, 3) if self.axis == "token" else values.flatten(3, 4)

    def _minima(self) -> Tensor:
        return self.scale.to(torch.float32) * -(2 ** (self.bits - 1)) if self.minimum is None else self.minimum

    def first(self, n: int) -> "Dense | Packed":
        """The part's first n rows."""
        if self.axis == "token":
            head = self.each(lambda tensor: tensor[:, :, : -(-n // self.group_size)])
            return Dense(head.read(torch.float32)[..., :n, :])
        return self.each(lambda tensor: tensor[:, :, :n])

    def at(self, index: Tensor) -> "Packed":
        """The rows index [B, Hkv, n], copied; axis "channel" only."""
        if self.axis == "token":
            raise TypeError("groups of tokens cannot be read row by row")
        return self.each(lambda tensor: take(tensor, index))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Packed":
        """The part with each of its tensors changed."""
        minimum = None if self.minimum is None else change(self.minimum)
        return replace(self, codes=change(self.codes), scale=change(self.scale), minimum=minimum)


@dataclass(frozen=True)
class Coded:
    """Codes of a codebook: a row is its norm times the levels of its codes.

    codes [B, Hkv, n, D / G, G * bits / 8], `pack`ed by G; norm float16 [B, Hkv, n]; levels float32 [2^bits].
    """

    codes: Tensor
    norm: Tensor
    levels: Tensor
    bits: int
    group_size: int

    @property
    def length(self) -> int:
        return self.codes.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[1]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The decoded rows: [B, Hkv, n, D]."""
        levels = self.levels.to(dtype)[unpack(self.codes, self.bits).flatten(3).int()]
        return levels * self.norm.to(dtype).unsqueeze(-1)

    def first(self, n: int) -> "Coded":
        """The part's first n rows."""
        return Coded(self.codes[:, :, :n], self.norm[:, :, :n], self.levels, self.bits, self.group_size)

    def at(self, index: Tensor) -> "Coded":
        """The rows index [B, Hkv, n], copied."""
        return Coded(take(self.codes, index), take(self.norm, index), self.levels, self.bits, self.group_size)


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
class Sum:
    """Rows that are the sum of several parts' rows, as codes and what is added to them. Only the reference reads it.

    terms: parts of the same n rows; the first is the one that all slots are counted by.
    """

    terms: tuple[Dense | Packed | Coded, ...]

    @property
    def length(self) -> int:
        return self.terms[0].length

    @property
    def kv_heads(self) -> int:
        return self.terms[0].kv_heads

    def read(self, dtype: torch.dtype) -> Tensor:
        """The summed rows: [B, Hkv, n, D]."""
        return torch.stack([term.read(dtype) for term in self.terms]).sum(0)

    def first(self, n: int) -> "Sum":
        """The part's first n rows."""
        return Sum(tuple(term.first(n) for term in self.terms))

    def at(self, index: Tensor) -> "Sum":
        """The rows index [B, Hkv, n], copied."""
        return Sum(tuple(term.at(index) for term in self.terms))


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


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [1 or B, 1 or H, N, ...] at index [B, 1 or H, n]: [B, H, n, ...]."""
    if rows.dtype == torch.float8_e4m3fn:  # bytes can be gathered, 8-bit floats cannot
        return take(rows.view(torch.uint8), index).view(rows.dtype)
    lead = index.shape[0], max(rows.shape[1], index.shape[1])
    wanted = index.expand(*lead, -1).reshape(*lead, -1, *([1] * (rows.ndim - 3)))
    return rows.expand(*lead, *rows.shape[2:]).gather(2, wanted.expand(-1, -1, -1, *rows.shape[3:]))


Part = Dense | Packed | Coded | Split | Sum | Paged
Parts = Sequence[Part]
"""Keys or values of one store, in slot order."""


def head_dim(part: Part) -> int:
    """Channels of a head: D or Dv."""
    if isinstance(part, Split):
        return head_dim(part.first_channels) + head_dim(part.last_channels)
    if isinstance(part, Paged | Sum):
        return head_dim(part.pool if isinstance(part, Paged) else part.terms[0])
    if isinstance(part, Dense):
        return part.rows.shape[3]
    return part.codes.shape[3] * (1 if isinstance(part, Packed) and part.axis == "token" else part.group_size)


def is_packed(part: Part) -> bool:
    """Whether a part's rows are codes, or their first channels are, or the first term of a sum is."""
    if isinstance(part, Sum):
        return is_packed(part.terms[0])
    return isinstance(part.first_channels if isinstance(part, Split) else part, Packed | Coded)


def total_length(parts: Sequence[Part]) -> int:
    """Slots that the parts cover together."""
    return sum(part.length for part in parts)


def read_all(parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
    """All rows in slot order: [B, Hkv, S, D]. For references and tests; kernels read part by part."""
    return torch.cat([part.read(dtype) for part in parts], dim=-2)
