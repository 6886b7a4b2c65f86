"""Requests that share the blocks of a common prefix: later requests do not run the prefix again.

    pool = PrefixPool(model, method, blocks_needed(prompts, max_new_tokens), revision)
    caches = [pool.admit(model, method, ids, max_new_tokens, revision) for ids in prompts]

A cache of the pool decodes like any other. Blocks are matched by their tokens and all tokens before them, and so by
position. A pool belongs to one model and one store.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.caches import KVCache
from kvbench.cache.decode_kernel import decode_kernel
from kvbench.cache.forward import check_prompt, forward, n_layers
from kvbench.cache.layer import SlotLayer
from kvbench.cache.method import Method
from kvbench.cache.paged import Blocks, PagedSlots, PagedStore
from kvbench.cache.plan import LayerPlan, slot_shape
from kvbench.cache.pool import BLOCK_SIZE, Pool, blocks_for
from kvbench.cache.prefill import prefill
from kvbench.cache.slots import Buffer
from kvbench.cache.state import empty_states
from kvbench.errors import UserError
from kvbench.models.shape import mla_layout

B = TypeVar("B")

PIECE = 64
"""Tokens that go through the model at once after a shared prefix: as many as the compiled kernel takes."""

WHOLE_LAYERS = (
    "has layers with a latent, a state or a sliding window; prefixes are shared where every layer holds "
    "every token's keys and values"
)


@dataclass
class Node(Generic[B]):
    """A full block, and the blocks that have followed it, by their tokens."""

    block: B | None = None
    following: dict[tuple[int, ...], "Node[B]"] = field(default_factory=dict)


class PrefixIndex(Generic[B]):
    """Full blocks of prompts, found by their tokens and all tokens before them."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self.root: Node[B] = Node()

    def match(self, tokens: list[int]) -> tuple[list[B], int]:
        """Blocks that hold the first n tokens, and n, as large as possible.

        n is smaller than the number of tokens, because the last token has to be run. The last block may hold other
        tokens after the first n.
        """
        blocks: list[B] = []
        node, n, most = self.root, 0, len(tokens) - 1
        while n < most:
            chunk = tuple(tokens[n : n + self.block_size])
            common, found = max(((_common(chunk, t), i) for i, t in enumerate(node.following)), default=(0, 0))
            if common == 0:
                break
            node = list(node.following.values())[found]
            if node.block is not None:
                blocks.append(node.block)
            n += common
            if common < self.block_size:
                break
        n = min(n, most)
        return blocks[: blocks_for(n, self.block_size)], n

    def add(self, tokens: list[int], blocks: list[B]) -> list[B]:
        """Add the full blocks of a prompt; returns the blocks that were not in the index before."""
        node, new = self.root, []
        for i, block in enumerate(blocks[: len(tokens) // self.block_size]):
            chunk = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
            if chunk not in node.following:
                node.following[chunk] = Node(block)
                new.append(block)
            node = node.following[chunk]
        return new


def _common(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    """The number of leading tokens that are equal."""
    for i, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return i
    return min(len(some), len(others))


def blocks_needed(
    prompts: Iterable[Tensor], max_new_tokens: int, share: bool = True, block_size: int = BLOCK_SIZE
) -> int:
    """Blocks of a pool for the prompts [1, T], admitted in that order, and `max_new_tokens` after each."""
    index: PrefixIndex[int] = PrefixIndex(block_size)
    needed = 0
    for ids in prompts:
        tokens = ids[0].tolist()
        known = index.match(tokens)[1] if share else 0
        needed += blocks_for(len(tokens) + max_new_tokens, block_size) - known // block_size  # the rest is copied
        index.add(tokens, list(range(blocks_for(len(tokens), block_size))))
    return needed


class PrefixPool:
    """Blocks for the layers of one model, shared by requests of any length.

    share: whether a request uses the blocks of prompts before it. Blocks of finished requests stay in the index until
    `forget`. positions_saved: prompt positions that were not run because blocks held their keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        blocks: int,
        revision: str = "",
        share: bool = True,
        kernel: str = "auto",
    ) -> None:
        if not isinstance(method.store, PagedStore) or method.rule.budget is not None or method.recomputes:
            raise UserError(
                f"method={method.name} on {type(method.store).__name__} cannot share prefixes: that takes "
                "blocks, and a rule that keeps every token; type method=full store=paged"
            )
        if mla_layout(model.config.get_text_config()) is not None or empty_states(model.config):
            raise UserError(f"{type(model).__name__} {WHOLE_LAYERS}")
        self.store, self.share, self.identity = method.store, share, identity(model, method, revision)
        self.kernel = decode_kernel(method, model, model.dtype, kernel)
        self.pools: list[Pool] = []
        self.blocks = [Blocks(blocks) for _ in range(n_layers(model))]
        self.index: PrefixIndex[tuple[int, ...]] = PrefixIndex(self.store.block_size)
        self.known: list[tuple[int, ...]] = []
        self.positions_saved = 0
        self._size = blocks

    @torch.inference_mode()
    def admit(
        self, model: PreTrainedModel, method: Method, ids: Tensor, max_new_tokens: int, revision: str = ""
    ) -> KVCache:
        """The cache of a prompt, ids [1, T], in blocks of this pool, ready to decode.

        Raises UserError where model, revision, dtype or store are not the pool's, and PoolEmpty where no block is left.
        """
        check_prompt(model, ids)
        if ids.shape[0] != 1:
            raise UserError(f"ids has {ids.shape[0]} rows; requests come one by one, as [1, tokens]")
        for key, mine in identity(model, method, revision).items():
            if mine != self.identity[key]:
                raise UserError(
                    f"this pool holds blocks of another {key}, {self.identity[key]}, and not of {mine}; "
                    "make a pool of its own for it"
                )
        tokens = ids[0].tolist()
        blocks, n = self.index.match(tokens) if self.share else ([], 0)
        if n:
            cache = self._from_blocks(model, method, ids, blocks, n, max_new_tokens)
        else:
            cache = self._from_prompt(model, method, ids, max_new_tokens)
        cache.shares_memory = True
        self.positions_saved += n
        if self.share:
            new = self.index.add(tokens, list(zip(*(slots.held[0] for slots in slots_of(cache)), strict=True)))
            self.known += new
            for block in new:
                for layer, number in zip(self.blocks, block, strict=True):
                    layer.share(number)
        return cache

    def give_back(self, cache: KVCache) -> None:
        """Free the blocks of a finished request, except those that other requests or the index hold."""
        for slots in slots_of(cache):
            slots.give_back()

    def forget(self) -> None:
        """Empty the index; a block is free once no request holds it."""
        for block in self.known:
            for layer, number in zip(self.blocks, block, strict=True):
                layer.give_back(number)
        self.known, self.index = [], PrefixIndex(self.store.block_size)

    def buffers(self) -> Iterator[Buffer]:
        """The tensors of all pools, with the share of their blocks that is in use."""
        for pool, blocks in zip(self.pools, self.blocks, strict=True):
            yield from pool.buffers(blocks.taken * pool.block_size)

    def _from_prompt(self, model: PreTrainedModel, method: Method, ids: Tensor, max_new_tokens: int) -> KVCache:
        """Run the whole prompt with exact attention, then write its keys and values to blocks."""
        record = prefill(model, ids, [method.rule])
        if any(layer.scoring.window is not None for layer in record.layers):
            raise UserError(f"{type(model).__name__} {WHOLE_LAYERS}")
        for layer in record.layers[len(self.pools) :]:
            shape = slot_shape(layer, 0)
            self.store.check(shape.key_dim, shape.value_dim)
            self.pools.append(self.store.pool(shape, self._size))
        layers = self._empty_layers(method, ids.shape[1] + max_new_tokens)
        cache = KVCache([*layers], record.logits.clone(), ids.shape[1])
        position = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
        with self._freed_on_failure(cache):
            for slots, layer in zip(layers, record.layers, strict=True):
                slots.fill(layer.key, layer.value, position, None, ids.shape[1])
        return cache

    def _from_blocks(
        self,
        model: PreTrainedModel,
        method: Method,
        ids: Tensor,
        blocks: list[tuple[int, ...]],
        n: int,
        max_new_tokens: int,
    ) -> KVCache:
        """Take the first n tokens from the blocks, and run only the rest through the model."""
        layers = self._empty_layers(method, ids.shape[1] + max_new_tokens)
        cache = KVCache([*layers], torch.empty(1, 0), ids.shape[1])
        cache.positions_processed = 0
        with self._freed_on_failure(cache), kvbench_attention(model):
            for layer, slots, numbers in zip(layers, slots_of(cache), zip(*blocks, strict=True), strict=True):
                slots.adopt(numbers, n)
                layer.adopt(n, n)
            for piece in ids[:, n:].split(PIECE, dim=1):
                cache.last_logits = forward(model, piece, cache, logits_to_keep=1)[:, -1].clone()
                cache.positions_processed += piece.shape[1]
        return cache

    def _empty_layers(self, method: Method, tokens: int) -> list[SlotLayer]:
        layers = []
        for index, (pool, blocks) in enumerate(zip(self.pools, self.blocks, strict=True)):
            slots = PagedSlots(pool, blocks, 1, blocks_for(tokens, pool.block_size))
            position = torch.arange(tokens, dtype=torch.int32, device=pool.device).expand(1, pool.heads, tokens)
            plan = LayerPlan(index, method.rule, self.store, step=PIECE, kernel=self.kernel)
            layers.append(SlotLayer(plan, slots, position))
        return layers

    @contextmanager
    def _freed_on_failure(self, cache: KVCache) -> Iterator[None]:
        """Free all blocks of a request that could not be admitted."""
        try:
            yield
        except BaseException:
            self.give_back(cache)
            raise


def slots_of(cache: KVCache) -> list[PagedSlots]:
    """The slots of a pool's cache, one for each layer."""
    return [
        layer.slots for layer in cache.layers if isinstance(layer, SlotLayer) and isinstance(layer.slots, PagedSlots)
    ]


def identity(model: PreTrainedModel, method: Method, revision: str) -> dict[str, str]:
    """The properties that must be equal for blocks to be shared.

    revision: of the weights; where it is unknown, the model object in memory stands for it.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "model": f"{type(model).__name__} of {n_layers(model)} layers and {heads} KV heads",
        "revision": revision or f"the model object {id(model)}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "store": repr(method.store),
    }
