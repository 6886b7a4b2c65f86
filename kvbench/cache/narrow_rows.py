"""Preallocated rows of which only some channels are held: the memory of ThinK's pruned keys."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.cache.slots import Buffer, SlotShape
from kvbench.kernels.parts import Narrow


class NarrowRows:
    """Rows of which some channels are held: [B, Hkv, rows, r] of channels int64 [B, Hkv, r]. length: rows held."""

    def __init__(self, rows: int, kept: int, shape: SlotShape) -> None:
        lead, self.width, self.length = (shape.batch, shape.kv_heads), shape.key_dim, 0
        self.rows = torch.empty(*lead, rows, kept, dtype=shape.dtype, device=shape.device)
        self.channels = torch.zeros(*lead, kept, dtype=torch.int64, device=shape.device)

    @property
    def capacity(self) -> int:
        """Most rows."""
        return self.rows.shape[2]

    def narrow(self, rows: Tensor) -> Tensor:
        """The held channels of rows [B, Hkv, n, D]."""
        return rows.gather(-1, self.channels.unsqueeze(2).expand(-1, -1, rows.shape[2], -1))

    def append(self, rows: Tensor) -> None:
        """Write rows [B, Hkv, n, D] behind those held."""
        self.rows[:, :, self.length : self.length + rows.shape[2]] = self.narrow(rows)
        self.length += rows.shape[2]

    def put(self, index: Tensor, rows: Tensor) -> None:
        """Write rows [B, Hkv, n, D] into the rows `index` [n]; `length` stays."""
        self.rows.index_copy_(2, index, self.narrow(rows))

    def whole(self) -> Narrow:
        """All rows, held or not."""
        return Narrow(self.rows, self.channels, self.width)

    def parts(self) -> list[Narrow]:
        """The rows held, as one part; none where nothing is held."""
        return [self.whole().first(self.length)] if self.length else []

    def buffers(self) -> Iterator[Buffer]:
        """The tensors, with the share in use."""
        yield Buffer("dense", self.rows, self.length / self.capacity if self.capacity else 1.0)
        yield Buffer("basis", self.channels, 1.0)
