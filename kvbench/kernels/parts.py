"""What a kernel reads: a store's keys and its values, each a sequence of parts that follow one another in slot order.

KIVI's keys are one packed part and one dense part; its values split elsewhere. A kernel walks the key parts for the
scores and the value parts for the output, so no store ever has to be unpacked as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.quantise import dequantise, unpack

Axis = Literal["token", "channel"]
"""What a group runs along: consecutive tokens of one channel, or consecutive channels of one token."""


@dataclass(frozen=True)
class Dense:
    """Rows in a float dtype: [B, Hkv, n, D]."""

    rows: Tensor

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


@dataclass(frozen=True)
class Packed:
    """Groups of `group_size` codes with a float16 scale and minimum each.

    axis "token":   codes [B, Hkv, n / G, D, G * bits / 8], pairs [B, Hkv, n / G, D]
    axis "channel": codes [B, Hkv, n, D / G, G * bits / 8], pairs [B, Hkv, n, D / G]
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
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
        values = dequantise(unpack(self.codes, self.bits), self.scale, self.minimum, dtype)
        return values.transpose(-1, -2).flatten(2, 3) if self.axis == "token" else values.flatten(3, 4)

    def first(self, n: int) -> "Dense | Packed":
        """The part's first n rows."""
        if self.axis == "token":
            blocks = -(-n // self.group_size)
            head = Packed(self.codes[:, :, :blocks], self.scale[:, :, :blocks], self.minimum[:, :, :blocks],
                          self.bits, self.group_size, self.axis)  # fmt: skip
            return Dense(head.read(torch.float32)[..., :n, :])
        return Packed(self.codes[:, :, :n], self.scale[:, :, :n], self.minimum[:, :, :n],
                      self.bits, self.group_size, self.axis)  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Rows whose last channels lie apart from the first: MLA's latent, and its rotated key in a format of its own.

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


Part = Dense | Packed | Split


def total_length(parts: Sequence[Part]) -> int:
    """Slots that the parts cover together."""
    return sum(part.length for part in parts)


def read_all(parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
    """All rows in slot order: [B, Hkv, S, D]. For references and tests; kernels read part by part."""
    return torch.cat([part.read(dtype) for part in parts], dim=-2)
