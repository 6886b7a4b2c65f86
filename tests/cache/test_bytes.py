"""Bytes that are held: of storages, of whole caches by hand and by formula, and over thousands of steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.decode import step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import Buffer, DenseStore, Store
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import exact_llama, random_ids
from tests.shared.models import random_llama

pytestmark = pytest.mark.engine

DENSE = DenseStore()


def test_a_view_counts_with_the_storage_it_keeps_alive() -> None:
    whole = torch.zeros(100, 8)
    held = held_bytes([Buffer("dense", whole[:3], 1.0)])
    assert (held.held, held.used, held.slack) == (3200, 96, 3104)


def test_two_views_of_one_storage_count_once() -> None:
    whole = torch.zeros(10, 8)
    halves = [Buffer("dense", whole[:5], 1.0), Buffer("dense", whole[5:], 1.0)]
    assert held_bytes(halves).held == 320
    copies = [Buffer("dense", whole[:5].clone(), 1.0), Buffer("codes", whole[5:].half(), 1.0)]
    assert held_bytes(copies).parts == {"dense": 160, "codes": 80}


def test_an_expanded_row_counts_as_the_row() -> None:
    row = torch.zeros(50, dtype=torch.int32).expand(4, 8, 50)
    held = held_bytes([Buffer("positions", row, 0.5), Buffer("positions", torch.empty(0), 1.0)])
    assert (held.held, held.used) == (200, 100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_full_cache_by_the_formula(dtype: torch.dtype) -> None:
    """2 * L * B * S * Hkv * D * bytes a number, for all planned slots, and one int32 position a slot and layer."""
    model = random_llama(6, 2, 32, layers=3, dtype=dtype)
    cache = build_cache(model, Method("full", Full(), DENSE), random_ids(2, 50), max_new_tokens=14)
    held = held_bytes(cache.buffers())
    size = 2 * 3 * 2 * 64 * 2 * 32 * dtype.itemsize
    assert held.parts == {"dense": size, "positions": 3 * 64 * 4}
    assert held.used == held.held * 50 // 64


@pytest.mark.parametrize("step_tokens", [1, 10])
def test_h2o_by_hand(step_tokens: int) -> None:
    """budget + step slots; per slot and head an int32 position and a float32 score, and a stack of free slots."""
    model = random_llama(6, 2, 32, dtype=torch.float32)
    method = Method("h2o", H2O(budget=20), DENSE)
    cache = build_cache(model, method, random_ids(3, 50), max_new_tokens=100, max_step=step_tokens)
    heads, slots = 2 * 3 * 2, 20 + step_tokens
    assert held_bytes(cache.buffers()).parts == {
        "dense": heads * slots * (32 + 32) * 4,
        "positions": heads * (slots * 4 + step_tokens * 8),
        "scores": heads * slots * 4,
    }


def reachable(thing: object, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor in the attributes, lists and dicts under an object of the engine."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.nn.Module):
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        inner = list(thing)
    elif type(thing).__module__.startswith("kvbench"):
        inner = list(vars(thing).values())
    else:
        return []
    return [tensor for part in inner for tensor in reachable(part, seen)]


METHODS: dict[str, tuple[KeepRule, Store]] = {
    "full": (Full(), DENSE),
    "h2o": (H2O(budget=16), DENSE),
    "streaming_llm": (StreamingLLM(budget=16), DENSE),
    "kivi4": (Full(), Kivi(4, 4, 8, 16)),
    "h2o-int4": (H2O(budget=16), PerToken(4, 4, 8)),
    "adakv-int4": (AdaKV(16, inner=H2O(budget=16)), PerToken(4, 4, 8)),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_tensor_of_the_cache_is_accounted_for(name: str) -> None:
    """Nothing that a layer can reach is missing from `buffers`: no forgotten copy, no prompt kept alive."""
    model, ids = exact_llama(4, 2), random_ids(2, 60)
    cache = build_cache(model, Method(name, *METHODS[name]), ids[:, :40], 20)
    for at in range(40, 60):
        step(model, ids[:, at : at + 1], cache)
    counted = {buffer.tensor.untyped_storage().data_ptr() for buffer in cache.buffers()}
    found = {t.untyped_storage().data_ptr() for layer in cache.layers for t in reachable(layer)}
    assert found and found <= counted
    held = held_bytes(cache.buffers())
    assert held.held == sum(held.parts.values()) and 0 <= held.slack < held.held


@pytest.mark.parametrize("steps", [500, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_bytes_and_addresses_stay_the_same_for_thousands_of_steps(name: str, steps: int) -> None:
    model = exact_llama(2, 1, layers=1)
    ids = random_ids(1, 40 + steps)
    cache = build_cache(model, Method(name, *METHODS[name]), ids[:, :40], steps)
    addresses = [(buffer.part, buffer.tensor.data_ptr()) for buffer in cache.buffers()]
    held = held_bytes(cache.buffers())
    for at in range(40, 40 + steps):
        step(model, ids[:, at : at + 1], cache)
        if at % 100 == 39:
            assert held_bytes(cache.buffers()) == held
            assert [(buffer.part, buffer.tensor.data_ptr()) for buffer in cache.buffers()] == addresses
            assert cache.kept_tokens == 16
    assert cache.get_seq_length() == 40 + steps


def test_compressed_caches_hold_fewer_bytes() -> None:
    """Of a 400-token prompt: the methods' reason to exist, in bytes held and not in bits promised."""
    model, ids = exact_llama(4, 2), random_ids(1, 400)
    held = {
        name: held_bytes(build_cache(model, Method(name, rule, store), ids, 8).buffers()).held
        for name, (rule, store) in METHODS.items()
    }
    assert held["h2o-int4"] < held["h2o"] < held["full"] / 15
    assert held["streaming_llm"] < held["full"] / 15
    assert held["kivi4"] < held["full"] / 5  # float64 rows, 4 bits and a float16 pair for each 8 of them
