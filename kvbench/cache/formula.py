"""Bytes of kept tokens by the formulas of their stores, nothing allocated."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from kvbench.cache.layer import SlotLayer
from kvbench.cache.mla import Latents, LatentStore, latents_of
from kvbench.cache.record import LayerRecord, PrefillRecord
from kvbench.cache.store import DenseStore, SlotShape, Store

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.cache.caches import KVCache


def store_of(record: LayerRecord, method: "Method", latents: Latents | None) -> Store:
    """The method's store, but of a layer that has a window of its own, which no method compresses."""
    store = method.store.for_layer(record.index) if record.scoring.window is None else DenseStore()
    return store if latents is None or latents.layout == "expand" else LatentStore(store, latents)


def kept_bytes(model: PreTrainedModel, method: "Method", record: PrefillRecord) -> Callable[["KVCache"], int]:
    """A function from a cache of the record to the bytes of its kept tokens, by the formulas of its stores.

    Nothing counts but keys and values: neither bookkeeping nor slots for tokens to come. The record may be gone.
    """
    latents = latents_of(model)
    stores = [store_of(layer, method, None if latents is None else latents[layer.index]) for layer in record.layers]
    shapes = [
        SlotShape(
            layer.key.shape[0],
            layer.key.shape[1],
            layer.key.shape[-1],
            layer.value.shape[-1],
            0,
            1,
            layer.key.dtype,
            layer.device,
        )
        for layer in record.layers
    ]

    def total(cache: "KVCache") -> int:
        found = 0
        for store, shape, layer in zip(stores, shapes, cache.attention_layers, strict=True):
            if isinstance(layer, SlotLayer):
                found += store.planned_bytes(replace(shape, slots=layer.kept))
            else:  # heads of different length, as one
                tokens = round(layer.kept * shape.batch * shape.kv_heads)
                found += store.planned_bytes(replace(shape, batch=1, kv_heads=1, slots=tokens))
        return found

    return total
