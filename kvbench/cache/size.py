"""Bytes of a method's cache by formula: from a model's config, without weights and without allocating."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast

import torch

from kvbench.cache.method import Method
from kvbench.cache.mla import Latents, LatentStore
from kvbench.cache.observe import recent_queries
from kvbench.cache.plan import slots_needed
from kvbench.cache.rule import KeepRule, SlidingWindow
from kvbench.cache.slots import SlotShape
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.models.shape import ModelShape, layer_windows, state_numbers, window_kv_heads


@dataclass(frozen=True)
class Planned:
    """The facts about a model's layers that decide the size of a cache.

    kv_heads; key_dim, value_dim: numbers a head; windows: of each layer with keys and values the model's own, None
    where it has none. latent: one head holds MLA's latent (value_dim numbers) and the rotated key, key_dim numbers
    together. window_kv_heads: of layers with a window. state_bytes: a row's, of the `state_layers` layers that keep a
    state of fixed size. query_heads: of each layer.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    windows: Sequence[int | None]
    dtype: torch.dtype
    latent: bool = False
    state_bytes: int = 0
    state_layers: int = 0
    window_kv_heads: int | None = None
    query_heads: int = 0

    def heads_of(self, window: int | None) -> int:
        """KV heads of a layer with that window; None: of a layer that sees every token."""
        return self.kv_heads if window is None or self.window_kv_heads is None else self.window_kv_heads

    @property
    def numbers(self) -> int:
        """Numbers that are cached for a token, in a layer and a head."""
        return self.key_dim if self.latent else self.key_dim + self.value_dim

    def full_bytes(self, batch: int, tokens: int) -> int:
        """2 * L * B * S * Hkv * D * bytes, with bounded layers at what their window or state holds between steps."""
        size = batch * self.numbers * self.dtype.itemsize
        held = sum(
            size * self.heads_of(window) * (tokens if window is None else min(tokens, window - 1))
            for window in self.windows
        )
        return held + batch * self.state_bytes


def planned_of(shape: ModelShape, config: Any, dtype: torch.dtype) -> Planned:
    """The facts about a model's layers, from its shape and config, for caches in `dtype`."""
    latent = shape.mla not in (None, "expand")
    key_dim = shape.head_dim + (config.qk_rope_head_dim if latent else 0)
    narrow, wide = state_numbers(config)
    return Planned(
        shape.kv_heads,
        key_dim,
        shape.value_dim,
        layer_windows(config),
        dtype,
        latent,
        narrow * dtype.itemsize + 4 * wide,
        shape.state_layers,
        window_kv_heads(config, shape.kv_heads),
        shape.query_heads,
    )


def planned_16bit(shape: ModelShape, config: Any) -> Planned | None:
    """As `planned_of`, for caches in 16 bits; None for families whose states have no known size."""
    try:
        return planned_of(shape, config, torch.bfloat16)
    except UserError:
        return None


def cache_bytes(method: Method, model: Planned, batch: int, prompt: int, new_tokens: int) -> int:
    """Bytes that the cache of `prompt` tokens with room for `new_tokens` more allocates, fed one at a time.

    Slots of the store, positions, scores, the stack of free slots and recent queries, layer by layer. Heads of
    different lengths, which hold whole blocks of a pool, are counted as holding equally many tokens.

    Raises UserError where the budget does not fit the prompt, TypeError where a store does not know its size.
    """
    if method.recomputes:
        return 0
    total = batch * model.state_bytes
    depth, layers = 0, list(model.windows).count(None)  # of those that the method applies to
    for window in model.windows:
        rule: KeepRule = method.rule if window is None else SlidingWindow(budget=max(1, window - 1))
        store: Store = method.store if window is None else DenseStore()
        if model.latent:
            store = LatentStore(store, cast(Latents, None))  # the weights play no part in its size
        budget = rule.layer_tokens(prompt, depth, layers)
        of_layer = replace(model, kv_heads=model.heads_of(window))
        total += _layer_bytes(rule, store, of_layer, batch, prompt, new_tokens, budget)
        depth += window is None
    return total


def _layer_bytes(
    rule: KeepRule, store: Store, model: Planned, batch: int, prompt: int, new_tokens: int, budget: int | None
) -> int:
    evicts = budget is not None and rule.holds_budget
    kept = prompt if budget is None else min(budget, prompt)
    every = rule.evicts_every
    slots = slots_needed(kept, budget if evicts else None, new_tokens, every=every)
    shape = SlotShape(batch, model.kv_heads, model.key_dim, model.value_dim, slots, 1, model.dtype, torch.device("cpu"))
    heads = batch * model.kv_heads
    positions = 4 * slots * (1 if budget is None else heads) + (8 * heads * every if evicts else 0)
    scored = evicts and type(rule).initial_scores is not KeepRule.initial_scores
    scores = 4 * heads * (slots if scored else 0) + 4 * heads * (rule.carries if evicts else 0)
    recent = recent_queries(rule.observations()) if scored and rule.rescores else 0
    queries = batch * model.query_heads * recent * model.key_dim * model.dtype.itemsize
    return store.planned_bytes(shape) + positions + scores + queries


def largest_batch(method: Method, model: Planned, prompt: int, new_tokens: int, room: int) -> int:
    """Rows of a batch whose caches fit into `room` bytes; the cache grows linearly with them."""
    one = cache_bytes(method, model, 1, prompt, new_tokens)
    return 0 if one == 0 else int(Fraction(max(0, room), one))
