"""Bytes of kept tokens by the formulas of their stores, nothing allocated."""

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedModel

from kvbench.cache.caches import KVCache
from kvbench.cache.layer import SlotLayer
from kvbench.cache.method import Method, store_of
from kvbench.cache.mla import latents_of
from kvbench.cache.plan import slot_shape
from kvbench.cache.record import PrefillRecord


def kept_bytes(model: PreTrainedModel, method: Method, record: PrefillRecord) -> Callable[[KVCache], int]:
    """A function from a cache of the record to the bytes of its kept tokens, by the formulas of its stores.

    Only keys and values count: no positions, no scores and no slots for tokens to come. The function does not need the
    record any more.
    """
    latents = latents_of(model)
    stores = [store_of(layer, method, None if latents is None else latents[layer.index]) for layer in record.layers]
    shapes = [slot_shape(layer, 0) for layer in record.layers]

    def total(cache: KVCache) -> int:
        found = 0
        for store, shape, layer in zip(stores, shapes, cache.attention_layers, strict=True):
            if isinstance(layer, SlotLayer):
                found += store.planned_bytes(replace(shape, slots=layer.kept))
            else:  # heads of different lengths count as one head
                tokens = round(layer.kept * shape.batch * shape.kv_heads)
                found += store.planned_bytes(replace(shape, batch=1, kv_heads=1, slots=tokens))
        return found

    return total
