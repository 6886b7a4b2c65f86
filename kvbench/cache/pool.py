"""A layer's memory in blocks of a few slots, shared by heads of different lengths or by several sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.slots import Buffer, Slots, SlotShape
from kvbench.cache.store import Store
from kvbench.kernels.parts import Coded, Dense, Packed, Paged, Part, Sum, take

BLOCK_SIZE = 16
"""Slots in a block."""

ZEROS = 4096
"""Rows that are cleared at once, so that clearing a large pool does not raise the peak memory."""


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """The number of blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


class Pool:
    """`blocks` blocks of one layer's keys and values, held as a store holds them.

    slots: the store's memory for one batch row of blocks * block_size tokens. heads: the layer's KV heads where a block
    holds the same slots of all heads; 1 where a block may belong to any head of any row.
    """

    def __init__(self, store: Store, shape: SlotShape, heads: int, blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.heads, self.blocks, self.block_size, self.device = heads, blocks, block_size, shape.device
        self.slots: Slots = store.allocate(pool_shape(shape, heads, blocks, block_size))
        zero = torch.zeros((), dtype=shape.dtype, device=shape.device)
        for first in range(0, self.rows, ZEROS):  # kernels read and mask slots that a head does not have: no NaN there
            lead = 1, heads, min(ZEROS, self.rows - first)
            self.slots.append(zero.expand(*lead, shape.key_dim), zero.expand(*lead, shape.value_dim))

    @property
    def rows(self) -> int:
        """Slots in all."""
        return self.blocks * self.block_size

    def rows_of(self, table: Tensor, slot: Tensor) -> Tensor:
        """The pool's rows that hold the slots [B, Hkv, q], of blocks table [B, 1 or Hkv, n]: int64 [B, Hkv, q]."""
        block = take(table, slot // self.block_size)
        return block.long() * self.block_size + slot % self.block_size

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write tokens [B, Hkv, q, D] and [B, Hkv, q, Dv] to the rows [B, Hkv, q]."""
        self.slots.overwrite(*(_as_one_row(x, self.heads) for x in (rows, key, value)))

    def fit(self, key: Tensor, value: Tensor) -> None:
        """Fix the store's static scales by the first tokens, [B, Hkv, n, D] and [B, Hkv, n, Dv]."""
        self.slots.fit(_as_one_row(key, self.heads), _as_one_row(value, self.heads))

    def copy(self, source: int, target: int) -> None:
        """Copy block `source` to block `target`, codes as codes."""
        n = self.block_size
        for _, tensor, _ in self.slots.buffers(0):
            if tensor.ndim > 2 and tensor.shape[2] == self.rows:  # a static scale or a codebook belongs to all blocks
                tensor[:, :, target * n : (target + 1) * n] = tensor[:, :, source * n : (source + 1) * n]

    def keys(self, table: Tensor, lengths: Tensor | None, length: int) -> Paged:
        """The keys of the blocks in `table`, as kernels read them; see `Paged`."""
        return Paged(_rows_of_all(self.slots.key_parts()), table, lengths, length, self.block_size)

    def values(self, table: Tensor, lengths: Tensor | None, length: int) -> Paged:
        """The values of the blocks in `table`, as kernels read them."""
        return Paged(_rows_of_all(self.slots.value_parts()), table, lengths, length, self.block_size)

    def buffers(self, kept: int) -> Iterator[Buffer]:
        """The store's tensors, with the share in use when `kept` rows hold tokens."""
        return self.slots.buffers(kept)


def pool_shape(shape: SlotShape, heads: int, blocks: int, block_size: int = BLOCK_SIZE) -> SlotShape:
    """The shape that a store allocates for a pool of `blocks` blocks."""
    return replace(shape, batch=1, kv_heads=heads, slots=blocks * block_size)


def _rows_of_all(parts: Sequence[Part]) -> Dense | Packed | Coded | Sum:
    if len(parts) != 1 or not isinstance(parts[0], Dense | Packed | Coded | Sum):
        raise TypeError(f"{parts} cannot be blocks of a pool")
    return parts[0]


def _as_one_row(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, q, ...] -> [1, heads, n, ...]: all rows behind one another in one batch row."""
    if heads == 1:
        return x.reshape(1, 1, -1, *x.shape[3:])
    return x.transpose(0, 1).reshape(1, heads, -1, *x.shape[3:])
