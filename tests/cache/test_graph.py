"""Decoders: what they hold in memory, and that they let go of it."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvbench.cache.build import Method, build_cache
from kvbench.cache.caches import KVCache
from kvbench.cache.captured import DecodeStep
from kvbench.cache.graph import EagerDecoder, GraphDecoder
from kvbench.cache.store import DenseStore, Store
from kvbench.methods.full import Full
from kvbench.methods.kivi import Kivi
from tests.shared.families import exact_llama, random_ids
from tests.shared.tape import TapeRecorder

pytestmark = pytest.mark.engine
R = 8


@pytest.mark.parametrize("store", [DenseStore(), Kivi(4, 4, 8, R)], ids=["full", "kivi"])
def test_a_deleted_decoder_and_its_cache_are_freed_at_once(store: Store) -> None:
    """Without a collection: over several of KIVI's flushes nothing points back to the decoder."""
    model, ids = exact_llama(4, 2), random_ids(1, 20)
    cache = build_cache(model, Method("m", Full(), store), ids, 3 * R, kernel="reference")
    assert isinstance(cache, KVCache)
    decoder = GraphDecoder(model, cache, DecodeStep(model, cache), TapeRecorder)
    for _ in range(3 * R):
        decoder.feed(random_ids(1, 1))
    assert decoder.is_graph and len(decoder.flushes) == isinstance(store, Kivi)
    watched = [weakref.ref(each) for each in (decoder, cache, decoder.decode, cache.attention_layers[0])]
    gc.collect()
    gc.disable()
    try:
        del decoder, cache
        assert [each() for each in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_an_eager_decoder_and_its_cache_are_freed_at_once() -> None:
    model = exact_llama(4, 2)
    decoder = EagerDecoder(model, build_cache(model, Method("m", Full(), DenseStore()), random_ids(1, 20), 4))
    decoder.feed(random_ids(1, 1))
    watched = weakref.ref(decoder), weakref.ref(decoder.cache)
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()
