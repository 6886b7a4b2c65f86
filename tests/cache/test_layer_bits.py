"""Code widths by layer: what is held in each layer, its bytes, its rows, and wrong mappings."""

from __future__ import annotations

import json

import pytest
import torch

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.layer_bits import LayerBits, at_layer, layer_bits, widths_of
from kvbench.cache.size import cache_bytes, planned_of
from kvbench.cache.store import SlotShape, Store
from kvbench.config import method_configs
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.kernels.parts import Packed
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.models.shape import shape_of
from tests.shared.models import random_llama

LAYERS, PROMPT, NEW = 3, 80, 8
MODEL = random_llama(4, 2, 32, layers=LAYERS, dtype=torch.float32)
IDS = torch.randint(97, (2, PROMPT), generator=torch.Generator().manual_seed(0))
KEYS, VALUES = {0: 8, 2: 2, "rest": 4}, {"1": 8, "rest": 2}
WANTED = ([8, 4, 2], [2, 8, 2])

STORES: dict[str, Store] = {
    "int": PerToken(KEYS, VALUES, 16),  # type: ignore[arg-type]
    "kivi": Kivi(KEYS, VALUES, 16, 32),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", STORES)
def test_each_layer_is_what_a_store_of_its_own_widths_is(name: str) -> None:
    """Codes and scales to the bit, and the formula of the whole cache within 1%."""
    method = Method(name, Full(), STORES[name])
    record = prefill(MODEL, IDS, [method])
    cache = build_cache(MODEL, method, record, NEW)
    assert isinstance(cache, KVCache)
    for index, layer in enumerate(cache.layers):
        k_bits, v_bits = WANTED[0][index], WANTED[1][index]
        plain = PerToken(k_bits, v_bits, 16) if name == "int" else Kivi(k_bits, v_bits, 16, 32)
        slots = plain.allocate(SlotShape(2, 2, 32, 32, PROMPT + NEW, 1, torch.float32, torch.device("cpu")))
        slots.fill(record.layers[index].key, record.layers[index].value)
        slots.settle()
        for ours, theirs in (
            (layer.slots.key_parts(), slots.key_parts()),
            (layer.slots.value_parts(), slots.value_parts()),
        ):
            for part, other in zip(ours, theirs, strict=True):
                assert type(part) is type(other)
                if isinstance(part, Packed) and isinstance(other, Packed):
                    assert part.bits == other.bits
                    assert torch.equal(part.codes, other.codes) and torch.equal(part.scale, other.scale)
    planned = cache_bytes(method, planned_of(shape_of(MODEL.config), MODEL.config, torch.float32), 2, PROMPT, NEW)
    assert held_bytes(cache.buffers()).held == pytest.approx(planned, rel=0.01)


def test_rules_evict_into_layers_of_different_widths_and_pages_hold_them() -> None:
    for method in (
        Method("h2o", H2O(budget=40), STORES["int"]),
        load_method("method=h2o store=paged inner=int k_bits={0:8,2:2,rest:4}", budget=40),
    ):
        cache = build_cache(MODEL, method, IDS, NEW)
        assert isinstance(cache, KVCache)
        pools = [getattr(layer.slots, "pool", None) for layer in cache.layers]
        slots = [layer.slots if pool is None else pool.slots for layer, pool in zip(cache.layers, pools, strict=True)]
        assert [slot.key_parts()[0].bits for slot in slots] == WANTED[0]


def test_what_is_typed_reaches_the_store_and_the_rows() -> None:
    overrides = ["compare=['method=full store=int k_bits={0:8,1:8,rest:4} v_bits=4','method=kivi bits={1:8,rest:2}']"]
    full, mixed, kivi = method_configs(BUILT_IN.composed(overrides), overrides)
    assert mixed.columns["k_bits"] is None and mixed.columns["bits"] is None and mixed.columns["v_bits"] == 4
    assert mixed.others["k_bits"] == {"0": 8, "1": 8, "rest": 4} and full.is_baseline
    assert kivi.others["k_bits"] == kivi.others["v_bits"] == {"1": 8, "rest": 2} and kivi.columns["bits"] is None
    json.dumps([mixed.effective, kivi.effective], sort_keys=True)
    store = load_method("method=full store=int k_bits={0:8,1:8,rest:4}").store
    assert isinstance(store, PerToken) and store.k_bits == LayerBits(((0, 8), (1, 8)), 4) and store.v_bits == 4


def test_mappings() -> None:
    bits = layer_bits("k_bits", {3: 8, "1": 2, "rest": 4})
    assert [at_layer(bits, layer) for layer in range(5)] == [4, 2, 4, 8, 4] and at_layer(4, 7) == 4
    assert widths_of(bits, 3) == (2, 8, 4, 3)
    for wrong in ({0: 8}, {-1: 8, "rest": 4}, {"first": 8, "rest": 4}):
        with pytest.raises(UserError, match=r"is no width for each layer; type layers and rest, as k_bits='\{0:8"):
            layer_bits("k_bits", wrong)
    with pytest.raises(UserError, match="bits=5 for this store; type bits=8, bits=4, bits=3 or bits=2"):
        PerToken({0: 5, "rest": 4}, 4)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="bits=3 for KIVI"):
        Kivi(4, {"rest": 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="k_bits differs by layer"):
        STORES["int"].allocate(SlotShape(1, 1, 32, 32, 8, 1, torch.float32, torch.device("cpu")))
