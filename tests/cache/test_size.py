"""What a store says it will take is what a cache of any keep rule and any store really takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.calibrate import bases_of
from kvbench.cache.observe import RecentQueries
from kvbench.cache.record import PrefillRecord
from kvbench.cache.rotary import key_rotations
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import SlotShape, Store
from kvbench.config import method_config
from kvbench.config.sources import BUILT_IN
from kvbench.method_runs import instantiate
from tests.shared.models import random_llama

LAYERS, KV_HEADS, HEAD, PROMPT, NEW, BATCH, BUDGET = 2, 2, 32, 150, 24, 2, 64
MODEL = random_llama(4, KV_HEADS, HEAD, layers=LAYERS, dtype=torch.float32)


@pytest.fixture(autouse=True, scope="module")
def hydra() -> Iterator[None]:
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        yield


def stores() -> dict[str, Store]:
    """Every store of conf/store, at a small residual."""
    found = {
        name: instantiate(method_config(compose("config", [f"store={name}", "residual=32"]))).store
        for name in BUILT_IN.names("store")
        if not name.startswith("hf_")
    }
    rotations = key_rotations(MODEL, LAYERS)
    bases = bases_of(MODEL, torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(1)), rotations)
    return {name: store.calibrated(bases, rotations) if store.calibrates else store for name, store in found.items()}


def rules() -> Iterator[tuple[str, KeepRule]]:
    """Every keep rule of conf/method that holds keys, with the budget where it takes one; AdaKV's heads, which hold
    whole blocks, have a test of their own."""
    for name in BUILT_IN.names("method"):
        if name.startswith("hf_"):
            continue
        for budget in (f"budget={BUDGET}", "budget=null"):
            try:
                method = instantiate(method_config(compose("config", [f"method={name}", budget])))
            except InstantiationException:  # it takes no budget, or needs one
                continue
            if not method.recomputes and not method.rule.ragged_heads:
                yield name, method.rule


def record_of(rules: list[KeepRule]) -> PrefillRecord:
    ids = torch.randint(0, 97, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    return prefill(MODEL, ids, rules)


def predicted(method: Method, record: PrefillRecord) -> int:
    """Bytes of a cache, summed over its parts: slots of the store, positions, the stack of free slots, scores."""
    total = 0
    for layer in range(LAYERS):
        budget = method.rule.layer_tokens(PROMPT, layer, LAYERS)
        kept = PROMPT if budget is None else min(budget, PROMPT)
        evicts = budget is not None and method.rule.holds_budget
        every = method.rule.evicts_every
        slots = min(kept + NEW, budget + every) if evicts and budget is not None else kept + NEW
        total += method.store.planned_bytes(
            SlotShape(BATCH, KV_HEADS, HEAD, HEAD, slots, 1, torch.float32, torch.device("cpu"))
        )
        heads = BATCH * KV_HEADS
        total += 4 * slots * (1 if budget is None else heads) + (8 * heads * every if evicts else 0)
        scored = evicts and method.rule.initial_scores(record.layers[layer]) is not None
        total += 4 * heads * (slots if scored else 0) + 4 * heads * (method.rule.carries if evicts else 0)
        if scored and method.rule.rescores:
            newest = next((each.count for each in method.rule.observations() if isinstance(each, RecentQueries)), 0)
            total += BATCH * MODEL.config.num_attention_heads * newest * HEAD * 4
    return total


def test_bytes_of_every_combination_are_the_sum_of_its_parts() -> None:
    held_rules, held_stores = dict(rules()), stores()
    record = record_of(list(held_rules.values()))
    seen = set()
    for rule_name, rule in held_rules.items():
        for store_name, store in held_stores.items():
            method = Method(rule_name, rule, store)
            if rule.budget is not None and rule.holds_budget and not store.writable:
                continue
            if rule.merges and not store.mergeable:
                continue
            cache = build_cache(MODEL, method, record, max_new_tokens=NEW)
            assert isinstance(cache, KVCache)
            assert held_bytes(cache.buffers()).held == pytest.approx(predicted(method, record), rel=0.01), method
            seen.add((rule_name, store_name))
    assert {("full", "kivi2"), ("snapkv", "kivi4"), ("h2o", "int4"), ("streaming_llm", "rot3")} <= seen
