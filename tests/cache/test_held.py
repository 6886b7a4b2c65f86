"""What a rule that scores anew is shown: the tokens held in order, read back from every store, and recent queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache
from kvbench.cache.calibrate import bases_of
from kvbench.cache.captured import DecodeStep
from kvbench.cache.decode import step
from kvbench.cache.held import held_in_slots, push_queries, query_ring
from kvbench.cache.layer import SlotLayer
from kvbench.cache.observe import RecentQueries
from kvbench.cache.paged import PagedStore
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import key_rotations
from kvbench.cache.slots import CannotCapture
from kvbench.cache.store import DenseSlots, DenseStore, SlotShape, Store
from kvbench.kernels.prefill import Scoring
from kvbench.methods.fp8 import Fp8
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.lagkv import LagKV
from kvbench.methods.lowrank import LowRank
from kvbench.methods.per_token import PerToken
from kvbench.methods.random import Random
from kvbench.methods.turbo import Turbo
from tests.shared.families import exact_llama, random_ids

MODEL = exact_llama(4, 2, 32)


def lowrank() -> LowRank:
    """Calibrated, of full rank."""
    bases = bases_of(MODEL, random_ids(4, 64, seed=9), key_rotations(MODEL, 2))
    return LowRank(rank=1.0).calibrated(bases, key_rotations(MODEL, 2))


STORES: dict[str, tuple[Store, float]] = {
    "dense": (DenseStore(), 1e-6),
    "bf16": (DenseStore("bfloat16"), 0.01),
    "int8": (PerToken(8, 8), 0.01),
    "rot8": (PerToken(8, 8, rotate=True), 0.01),
    "fp8": (Fp8(), 0.07),
    "turbo4": (Turbo(4, 4), 0.15),
    "paged": (PagedStore(), 1e-6),
    "lowrank": (lowrank(), 1e-4),
}


@pytest.mark.parametrize("name", STORES)
@torch.inference_mode()
def test_tokens_are_read_back_in_order_and_in_the_model_s_basis(name: str) -> None:
    """After steps that overwrote slots, of the first layer, whose keys do not depend on what was evicted."""
    store, tolerance = STORES[name]
    ids = random_ids(2, 70)
    whole = build_cache(MODEL, Method("m", Random(budget=200), DenseStore()), ids).attention_layers[0]
    cache = build_cache(MODEL, Method("m", Random(budget=20), store), ids[:, :40], 30, max_step=3, kernel="reference")
    for at in range(40, 70, 3):
        step(MODEL, ids[:, at : at + 3], cache)
    layer = cache.attention_layers[0]
    assert isinstance(layer, SlotLayer) and isinstance(whole, SlotLayer) and layer.counters.free == 3
    written = layer.position[..., : layer.counters.written]
    zeros = torch.zeros(written.shape)
    held, slot = held_in_slots(layer.slots, written, zeros, 20, 70, None, Scoring(0.2), None)
    assert torch.equal(held.position, layer.kept_positions())
    assert torch.equal(written.gather(-1, slot).long(), held.position)
    index = held.position.unsqueeze(-1).expand(-1, -1, -1, 32)
    for ours, all_tokens in zip((held.key, held.value), whole.slots.read_back(), strict=True):
        theirs = all_tokens.gather(2, index)
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance


def test_a_store_that_turns_queries_says_how_keys_are_turned_back() -> None:
    class Turned(DenseSlots):
        def transform_query(self, query: Tensor) -> Tensor:
            return -query

    slots = Turned(SlotShape(1, 1, 8, 8, 4, 1, torch.float32, torch.device("cpu")), torch.float32)
    slots.append(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))
    with pytest.raises(TypeError, match="define `restore_keys`"):
        slots.read_back()


def test_recent_queries_are_the_prompt_s_then_the_newest() -> None:
    tokens, wanted = torch.arange(12.0).view(1, 1, 12, 1).expand(2, 4, 12, 3), (RecentQueries(5),)
    zeros = torch.zeros(2, 2, 3, 3)
    record = LayerRecord(0, zeros, zeros, Scoring(1.0))
    record.observed[wanted[0]] = wanted[0].compute(tokens[:, :, :3], zeros, record.scoring)
    ring = query_ring(record, wanted)
    assert ring is not None and ring[0, 0, :, 0].tolist() == [0, 0, 0, 1, 2]
    for start, stop, newest in ((3, 4, [0, 0, 1, 2, 3]), (4, 6, [1, 2, 3, 4, 5]), (6, 12, [7, 8, 9, 10, 11])):
        push_queries(ring, tokens[:, :, start:stop])
        assert ring[1, 3, :, 0].tolist() == newest
    assert query_ring(replace(record, observed={}), ()) is None


def test_a_rule_that_reads_on_the_host_is_not_captured_and_named() -> None:
    ids = random_ids(1, 60)
    for rule, captured in (
        (LagKV(budget=40, block=8, decode="evict"), False),
        (KeyDiff(budget=40, decode="evict"), True),
    ):
        cache = build_cache(MODEL, Method("m", rule, DenseStore()), ids, 9, kernel="reference")
        if captured:
            DecodeStep(MODEL, cache)
            continue
        with pytest.raises(CannotCapture, match="LagKV reads on the host"):
            DecodeStep(MODEL, cache)
