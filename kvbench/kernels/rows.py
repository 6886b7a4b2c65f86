"""Rows of keys or values as kernels read them: of floats, of groups of codes, and of a codebook's codes."""

from collections.abc import Callable
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


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [1 or B, 1 or H, N, ...] at index [B, 1 or H, n]: [B, H, n, ...]."""
    if rows.dtype == torch.float8_e4m3fn:  # bytes can be gathered, 8-bit floats cannot
        return take(rows.view(torch.uint8), index).view(rows.dtype)
    lead = index.shape[0], max(rows.shape[1], index.shape[1])
    wanted = index.expand(*lead, -1).reshape(*lead, -1, *([1] * (rows.ndim - 3)))
    return rows.expand(*lead, *rows.shape[2:]).gather(2, wanted.expand(-1, -1, -1, *rows.shape[3:]))
