"""Pages: slots in blocks of a pool, taken when needed, shared by reference, copied when a shared one is written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.cache.pool import BLOCK_SIZE, Pool, blocks_for, pool_shape
from kvbench.cache.rule import is_whole
from kvbench.cache.slots import Buffer, CapturedSlots, Slots, SlotShape
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.kernels.parts import Part


class PoolEmpty(RuntimeError):
    """A block was needed and no block of the pool is free."""


class Blocks:
    """How many holders each block of a pool has. Raises ValueError for a block that is free."""

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self.most_taken = 0

    @property
    def taken(self) -> int:
        """Blocks with at least one holder."""
        return len(self._holders) - len(self._free)

    def take(self) -> int:
        """Take a free block; it has one holder then. Raises PoolEmpty."""
        if not self._free:
            raise PoolEmpty(f"all {len(self._holders)} blocks of the pool are taken")
        block = self._free.pop()
        self._holders[block] = 1
        self.most_taken = max(self.most_taken, self.taken)
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block."""
        self._check(block)
        self._holders[block] += 1

    def give_back(self, block: int) -> None:
        """Remove a holder from a block; without holders it is free."""
        self._check(block)
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether a block has more than one holder."""
        return self._holders[block] > 1

    def _check(self, block: int) -> None:
        if self._holders[block] == 0:
            raise ValueError(f"block {block} is free: it was given back already")


@dataclass(frozen=True)
class PagedStore(Store):
    """Blocks of `block_size` slots out of one pool, a block table a sequence (Kwon et al., 2023, arXiv:2309.06180).

    Tokens are held as by `inner`, bit for bit: paging manages memory and compresses nothing. A sequence takes blocks as
    it grows and wastes less than one block, and sequences can share the blocks of a common prefix
    (`kvbench.cache.prefix`).
    """

    inner: Store = field(default_factory=DenseStore)
    block_size: int = BLOCK_SIZE

    poolable: ClassVar[bool] = False
    in_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.inner.writable and self.inner.poolable):
            raise UserError(
                f"inner={type(self.inner).__name__} for store=paged has no single slots that could lie "
                "anywhere; type inner=dense, int8, int4, int2 or rot4"
            )
        if not is_whole(self.block_size) or self.block_size < 1:
            raise UserError(f"block_size={self.block_size} slots for store=paged; type a whole number, as 16")

    @property
    def static_scales(self) -> bool:
        return self.inner.static_scales

    def check(self, key_dim: int, value_dim: int) -> None:
        self.inner.check(key_dim, value_dim)

    def allocate(self, shape: SlotShape) -> "PagedSlots":
        each = blocks_for(shape.slots, self.block_size)
        pool = self.pool(shape, shape.batch * each)
        return PagedSlots(pool, Blocks(pool.blocks), shape.batch, each)

    def pool(self, shape: SlotShape, blocks: int) -> Pool:
        """A pool of `blocks` blocks for layers of that shape."""
        return Pool(self.inner, shape, shape.kv_heads, blocks, self.block_size)

    def planned_bytes(self, shape: SlotShape) -> int:
        each = blocks_for(shape.slots, self.block_size)
        rows = self.inner.planned_bytes(pool_shape(shape, shape.kv_heads, shape.batch * each, self.block_size))
        return rows + 4 * shape.batch * each


class PagedSlots(Slots):
    """Sequences of one length, each with a table of blocks that hold the slots of all its KV heads.

    table: int32 [B, 1, most blocks]. held: the same numbers on the host, of the taken blocks only.
    """

    def __init__(self, pool: Pool, blocks: Blocks, batch: int, most: int) -> None:
        self.pool, self.blocks = pool, blocks
        self.table = torch.zeros(batch, 1, most, dtype=torch.int32, device=pool.device)
        self.held: list[list[int]] = [[] for _ in range(batch)]

    def fill(self, key: Tensor, value: Tensor) -> None:
        if self.blocks.taken == 0:  # the pool's first tokens
            self.pool.fit(key, value)
        self.append(key, value)

    def append(self, key: Tensor, value: Tensor) -> None:
        q = key.shape[2]
        self._own(self.length, self.length + q)
        slot = torch.arange(self.length, self.length + q, device=key.device)
        self.overwrite(slot.expand(*key.shape[:2], q), key, value)
        self.length += q

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Write q tokens to the slots [B, Hkv, q]; no other sequence may hold their blocks."""
        self.pool.write(self.pool.rows_of(self.table, slot), key, value)

    def _own(self, first: int, stop: int) -> None:
        """Make the blocks of slots first .. stop - 1 this sequence's own: take missing ones, copy shared ones."""
        size = self.pool.block_size
        for row, held in enumerate(self.held):
            for i in range(first // size, blocks_for(stop, size)):
                if i == len(held):
                    held.append(self.blocks.take())
                elif self.blocks.is_shared(held[i]):
                    fresh = self.blocks.take()
                    self.pool.copy(held[i], fresh)
                    self.blocks.give_back(held[i])
                    held[i] = fresh
                else:
                    continue
                self.table[row, 0, i] = held[i]

    def adopt(self, blocks: Sequence[int], length: int) -> None:
        """Begin with `length` tokens in blocks that others hold; for one sequence without tokens."""
        if self.length or len(self.held) > 1 or len(blocks) != blocks_for(length, self.pool.block_size):
            raise ValueError(f"{len(blocks)} blocks for {length} tokens of {len(self.held)} sequences")
        for block in blocks:
            self.blocks.share(block)
        self.held[0] = list(blocks)
        self.table[0, 0, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.length = length

    def give_back(self) -> None:
        """Give back all blocks; no slot is written then."""
        for held in self.held:
            for block in held:
                self.blocks.give_back(block)
            held.clear()
        self.length = 0

    def transform_query(self, query: Tensor) -> Tensor:
        return self.pool.slots.transform_query(query)

    def restore_keys(self, key: Tensor) -> Tensor:
        return self.pool.slots.restore_keys(key)

    def restore_output(self, output: Tensor) -> Tensor:
        return self.pool.slots.restore_output(output)

    @property
    def has_quantised(self) -> bool:
        return self.length > 0 and self.pool.slots.has_quantised

    def key_parts(self) -> Sequence[Part]:
        return [self.pool.keys(self.table, None, self.length)]

    def value_parts(self) -> Sequence[Part]:
        return [self.pool.values(self.table, None, self.length)]

    def captured(self) -> CapturedSlots:
        return CapturedPages(self)

    def own_next(self) -> None:
        """Make the block of the slot behind the last one this sequence's own."""
        self._own(self.length, self.length + 1)

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.pool.buffers(kept * len(self.held))
        yield Buffer("positions", self.table, 1.0)


class CapturedPages(CapturedSlots):
    """The captured form of `PagedSlots`. The host takes blocks between steps and writes them to the same table."""

    def __init__(self, slots: PagedSlots) -> None:
        where = slots.table, None, slots.position.shape[-1]
        super().__init__(slots, [slots.pool.keys(*where)], [slots.pool.values(*where)])
        self.pages = slots

    def prepare(self) -> None:
        self.pages.own_next()
