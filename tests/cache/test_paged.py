"""Paging: the allocator against a dictionary, pages against plain slots, shared prefixes against lone requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import generate, step
from kvbench.cache.paged import Blocks, PagedSlots, PagedStore, PoolEmpty
from kvbench.cache.prefix import PrefixIndex, PrefixPool, blocks_needed, slots_of
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.fp8 import Fp8
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.turbo import Turbo
from tests.shared.families import exact_llama, random_ids, tiny
from tests.shared.models import random_llama

PAGED = Method("full", Full(), PagedStore())
DENSE = Method("full", Full(), DenseStore())
MODEL = exact_llama(4, 2)

# ---------------------------------------------------------------- the allocator


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give_back"]), st.integers(0, 7)), max_size=60))
def test_blocks_against_a_dictionary(actions: list[tuple[str, int]]) -> None:
    """Never two holders of one block unless shared, never a free block given back, none lost."""
    blocks, holders, most = Blocks(5), dict[int, int](), 0
    for action, number in actions:
        if action == "take":
            if len(holders) == 5:
                with pytest.raises(PoolEmpty, match="all 5 blocks"):
                    blocks.take()
                continue
            block = blocks.take()
            assert block not in holders and 0 <= block < 5
            holders[block] = 1
        elif number > 4 or number not in holders:
            if number <= 4:
                with pytest.raises(ValueError, match="given back already"):
                    getattr(blocks, action)(number)
            continue
        elif action == "share":
            blocks.share(number)
            holders[number] += 1
        else:
            blocks.give_back(number)
            holders[number] -= 1
            holders = {block: count for block, count in holders.items() if count}
        most = max(most, len(holders))
        assert (blocks.taken, blocks.most_taken) == (len(holders), most)
        assert all(blocks.is_shared(block) == (holders.get(block, 0) > 1) for block in range(5))
    for block, count in holders.items():
        for _ in range(count):
            blocks.give_back(block)
    assert blocks.taken == 0 and sorted(blocks.take() for _ in range(5)) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- one cache


@pytest.mark.parametrize(
    "entry",
    [
        "method=full",
        "method=h2o budget=20",
        "method=streaming_llm budget=20",
        "method=snapkv budget=40",
        "method=full inner=bf16",
        "method=h2o budget=20 inner=int4",
        "method=full inner=rot3",
        "method=h2o budget=20 inner=q4_0",
        "method=knorm budget=20 inner=turbo4",
    ],
)
def test_pages_change_no_number(entry: str) -> None:
    """The same logits to the last bit, over block borders, with questions, for two rows at once."""
    model, ids = random_llama(4, 2, 32, dtype=torch.float32), random_ids(2, 90)
    words = [word for word in entry.split() if not word.startswith("inner=")]
    inner = next((word.removeprefix("inner=") for word in entry.split() if word.startswith("inner=")), "dense")
    for kernel in ("cpu", "reference"):
        caches = [
            build_cache(model, load_method(" ".join(e)), ids[:, :44], 46, max_step=5, kernel=kernel)
            for e in ([*words, f"store={inner}"], [*words, "store=paged", f"inner={inner}"])
        ]
        at = 44
        for q in [*[1] * 20, 5, *[1] * 21]:
            plain, paged = (step(model, ids[:, at : at + q], cache, logits_to_keep=0) for cache in caches)
            assert torch.equal(plain, paged), (at, kernel)
            at += q
        assert caches[0].kept_tokens == caches[1].kept_tokens and caches[1].kernel_name != "triton"


def test_blocks_are_taken_as_a_sequence_grows() -> None:
    cache = build_cache(MODEL, PAGED, random_ids(2, 40)[:, :30], 20)
    assert isinstance(cache, KVCache)
    counts = []
    for token in random_ids(2, 20, seed=1).split(1, dim=1):
        step(MODEL, token, cache)
        counts.append({slots.blocks.taken for slots in slots_of(cache)})
    assert counts == [{2 * (2 if seen <= 32 else 3 if seen <= 48 else 4)} for seen in range(31, 51)]
    for slots in slots_of(cache):
        slots.give_back()
        assert slots.blocks.taken == 0 and slots.length == 0
        held = slots.held
        slots.held = [[0]]
        with pytest.raises(ValueError, match="given back already"):
            slots.give_back()
        slots.held = held


def test_refusals_of_the_store() -> None:
    for inner in (Kivi(), PagedStore()):
        with pytest.raises(UserError, match="single slots"):
            PagedStore(inner)
    with pytest.raises(UserError, match="block_size=0"):
        PagedStore(block_size=0)
    with pytest.raises(UserError, match="group="):
        build_cache(MODEL, Method("x", Full(), PagedStore(PerToken(4, 4, 32))), random_ids(1, 20))


# ---------------------------------------------------------------- requests with a common prefix


def prompts(*own: int, common: int = 100) -> list[Tensor]:
    """Prompts [1, common + n], the same in the first `common` tokens and different right behind them."""
    shared = random_ids(1, common)
    tails = [random_ids(1, n, seed=50 + i) for i, n in enumerate(own)]
    for i, tail in enumerate(tails):
        tail[0, 0] = 10 + i
    return [torch.cat([shared, tail], dim=1) for tail in tails]


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Positions that really went through the model's layers."""
    counts: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, args, out: counts.append(out[..., 0].numel()))
    try:
        yield counts
    finally:
        hook.remove()


def decode_in_turns(model: nn.Module, caches: list[KVCache], tokens: Tensor) -> list[list[Tensor]]:
    """Logits of every request after its prompt and each of its tokens [n, T], one step of each in turn."""
    logits = [[cache.last_logits] for cache in caches]
    for t in range(tokens.shape[1]):
        for i, cache in enumerate(caches):
            logits[i].append(step(model, tokens[i : i + 1, t : t + 1], cache)[:, -1])
    return logits


@pytest.mark.parametrize("share", [True, False])
def test_requests_of_a_pool_equal_requests_by_themselves(share: bool) -> None:
    """Logits of every step; positions counted in the model itself; blocks and bytes exactly as planned."""
    own, new = [5, 28, 1, 90, 13], 40
    requests, tokens = prompts(*own), random_ids(5, new, seed=9)
    pool = PrefixPool(MODEL, PAGED, blocks_needed(requests, new, share), share=share)
    with counted(MODEL) as positions:
        caches = [pool.admit(MODEL, PAGED, ids, new) for ids in requests]
    lengths = [100 + n for n in own]
    saved = 96 + 3 * 100 if share else 0  # the first prompt ends within its seventh block, which is not full
    assert sum(positions) == sum(lengths) - saved == sum(cache.positions_processed for cache in caches)
    assert pool.positions_saved == saved
    got = decode_in_turns(MODEL, caches, tokens)
    for i, ids in enumerate(requests):
        alone = build_cache(MODEL, DENSE, ids, new)
        assert isinstance(alone, KVCache)
        for one, other in zip(got[i], decode_in_turns(MODEL, [alone], tokens[i : i + 1])[0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    blocks = sum(-(-(n + new) // 16) for n in lengths) - (4 * 6 if share else 0)
    assert {layer.taken for layer in pool.blocks} == {layer.most_taken for layer in pool.blocks} == {blocks}
    held = held_bytes(pool.buffers())
    assert held.held == blocks * 16 * 2 * 2 * 2 * 16 * 8 and held.slack == 0  # layers, sides, heads, channels, float64
    for cache in caches:
        pool.give_back(cache)
    assert {layer.taken for layer in pool.blocks} == {len(pool.known)}
    pool.forget()
    assert not any(layer.taken for layer in pool.blocks) and not pool.known
    with pytest.raises(ValueError, match="given back already"):
        slots_of(caches[0])[0].blocks.give_back(0)


def test_one_prompt_many_continuations() -> None:
    """Of a prompt that is known as a whole only the last token runs; its block is copied once it is written."""
    ids, tokens = random_ids(1, 64), random_ids(3, 20, seed=2)
    pool = PrefixPool(MODEL, PAGED, blocks_needed([ids] * 3, 20))
    caches = [pool.admit(MODEL, PAGED, ids, 20) for _ in range(3)]
    assert [cache.positions_processed for cache in caches] == [64, 1, 1]
    first, second = (slots_of(cache)[0].held[0] for cache in caches[:2])
    assert first[:3] == second[:3] and first[3] != second[3]
    got = decode_in_turns(MODEL, caches, tokens)
    for i in range(3):
        alone = build_cache(MODEL, DENSE, ids, 20)
        assert isinstance(alone, KVCache)
        for one, other in zip(got[i], decode_in_turns(MODEL, [alone], tokens[i : i + 1])[0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    with pytest.raises(UserError, match="fed since its prompt"):  # few positions were run for it, and it has moved on
        generate(MODEL, None, caches[1], 3)


NARROW = [(DenseStore("bfloat16"), 0.1), (PerToken(8, 8, 8), 0.1), (Turbo(), 1), (Fp8(), 1)]


@pytest.mark.parametrize(("inner", "near"), NARROW, ids=["bf16", "int8", "turbo4", "fp8"])
def test_narrow_blocks_are_shared_as_they_are(inner: Store, near: float) -> None:
    """A request that continues from narrow keys attends to those, and stays near one that prefilled for itself: as near
    as 8 or 16 bits, or turbo's 4 and e4m3's 3 behind the point, bring it."""
    method = Method("full", Full(), PagedStore(inner))
    requests = prompts(20, 30)
    pool = PrefixPool(MODEL, method, blocks_needed(requests, 10))
    caches = [pool.admit(MODEL, method, ids, 10) for ids in requests]
    alone = build_cache(MODEL, method, requests[1], 10)
    assert pool.positions_saved == 100
    for slots in slots_of(caches[1]):  # the seventh block, which was shared for four tokens, has been copied
        blocks = [slots_of(cache)[slots_of(caches[1]).index(slots)].held[0][6] for cache in caches]
        rows = slots.pool.slots.key_parts()[0].read(torch.float64)
        assert blocks[0] != blocks[1]
        assert torch.equal(*(rows[:, :, 16 * block : 16 * block + 4] for block in blocks))
    scale = alone.last_logits.std()
    assert 0 < (caches[1].last_logits - alone.last_logits).abs().max() < near * scale


# ---------------------------------------------------------------- what must not be shared


def test_another_model_revision_or_store_is_refused() -> None:
    ids = random_ids(1, 40)
    pool = PrefixPool(MODEL, PAGED, 20, revision="abc")
    pool.admit(MODEL, PAGED, ids, 4, revision="abc")
    other_heads = exact_llama(4, 1)
    others: list[tuple[nn.Module, Method, str, str]] = [
        (MODEL, PAGED, "abd", "another revision, abc, and not of abd"),
        (other_heads, PAGED, "abc", "another model"),
        (MODEL, Method("full", Full(), PagedStore(PerToken(8, 8, 8))), "abc", "another store"),
        (MODEL, DENSE, "abc", "another store"),
    ]
    for model, method, revision, says in others:
        with pytest.raises(UserError, match=says):
            pool.admit(model, method, ids, 4, revision)
    unnamed = PrefixPool(MODEL, PAGED, 20)
    unnamed.admit(MODEL, PAGED, ids, 4)
    with pytest.raises(UserError, match="another revision"):  # the same shape, other weights, and no revision told
        unnamed.admit(exact_llama(4, 2), PAGED, ids, 4)
    assert pool.positions_saved == unnamed.positions_saved == 0


def test_an_edited_middle_ends_what_is_shared() -> None:
    """Behind the edit the tokens are the same again and their keys are not: nothing of them is used."""
    ids = random_ids(1, 96)
    edited = ids.clone()
    edited[0, 37] = (edited[0, 37] + 1) % 90 + 3
    shifted = ids[:, 16:]
    pool = PrefixPool(MODEL, PAGED, 30)
    pool.admit(MODEL, PAGED, ids, 4)
    for other, known in ((edited, 37), (shifted, 0)):
        before = pool.positions_saved
        cache = pool.admit(MODEL, PAGED, other, 4)
        assert pool.positions_saved - before == known and cache.positions_processed == other.shape[1] - known
        alone = build_cache(MODEL, DENSE, other, 4)
        torch.testing.assert_close(cache.last_logits, alone.last_logits, atol=1e-9, rtol=0)


def test_the_index_against_comparing_all_prompts() -> None:
    """What matches is the longest common start with any prompt's full blocks, one token short of the whole."""
    draw = torch.Generator().manual_seed(0)
    index: PrefixIndex[tuple[int, ...]] = PrefixIndex(4)
    known: list[list[int]] = []
    for _ in range(200):
        tokens = torch.randint(0, 2, (int(torch.randint(1, 30, (), generator=draw)),), generator=draw).tolist()
        blocks, n = index.match(tokens)
        starts = [_common(tokens, other[: len(other) // 4 * 4]) for other in known]
        assert n == min(max(starts, default=0), len(tokens) - 1)
        assert [block[: n - 4 * i] for i, block in enumerate(blocks)] == [
            tuple(tokens[4 * i : min(4 * i + 4, n)]) for i in range(-(-n // 4))
        ]
        index.add(tokens, [tuple(tokens[i : i + 4]) for i in range(0, len(tokens), 4)])
        known.append(tokens)


def _common(some: list[int], others: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


def test_random_traffic_leaks_no_block() -> None:
    """Requests come and go; a full pool admits nobody and loses nothing; in the end every block is free."""
    draw = torch.Generator().manual_seed(1)
    pool = PrefixPool(MODEL, PAGED, 14)
    texts, live, refused = prompts(3, 17, 40, 60, common=40), list[KVCache](), 0
    for turn in range(40):
        if live and torch.rand((), generator=draw) < 0.4:
            pool.give_back(live.pop(int(torch.randint(0, len(live), (), generator=draw))))
        else:
            before = [layer.taken for layer in pool.blocks]
            try:
                live.append(pool.admit(MODEL, PAGED, texts[turn % 4], 8))
            except PoolEmpty:
                refused += 1
                assert [layer.taken for layer in pool.blocks] == before
                pool.forget()
        holders = {block for cache in live for block in slots_of(cache)[0].held[0]} | {b[0] for b in pool.known}
        assert {layer.taken for layer in pool.blocks} == {len(holders)}
    assert refused and pool.positions_saved
    for cache in live:
        pool.give_back(cache)
    pool.forget()
    assert not any(layer.taken for layer in pool.blocks)


def test_what_cannot_share() -> None:
    for method in (DENSE, Method("h2o", H2O(20), PagedStore())):
        with pytest.raises(UserError, match="type method=full store=paged"):
            PrefixPool(MODEL, method, 10)
    windowed = tiny("mistral-window")
    with pytest.raises(UserError, match="sliding window"):
        PrefixPool(windowed, PAGED, 10).admit(windowed, PAGED, random_ids(1, 30), 4)
    with pytest.raises(UserError, match="one by one"):
        PrefixPool(MODEL, PAGED, 10).admit(MODEL, PAGED, random_ids(2, 30), 4)
    slots = slots_of(PrefixPool(MODEL, PAGED, 10).admit(MODEL, PAGED, random_ids(1, 30), 4))[0]
    with pytest.raises(ValueError, match="3 blocks for 20 tokens"):
        PagedSlots(slots.pool, slots.blocks, 1, 4).adopt([0, 1, 2], 20)
