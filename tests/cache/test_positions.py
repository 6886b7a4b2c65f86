"""Positions and state: what the next token is called, what the run costs, and that caches share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from kvbench.cache.build import Method, PrefillRecord, build_cache, check_model, prefill
from kvbench.cache.caches import AnyCache, KVCache, RecomputeCache
from kvbench.cache.decode import generate, step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import exact_llama, random_ids

pytestmark = pytest.mark.engine

DENSE = DenseStore()
METHODS: dict[str, tuple[KeepRule, Store]] = {
    "full": (Full(), DENSE),
    "h2o": (H2O(budget=16), DENSE),
    "h2o-int4": (H2O(budget=16), PerToken(4, 4, 8)),
    "streaming_llm": (StreamingLLM(budget=16), DENSE),
    "random": (Random(budget=16), DENSE),
    "kivi2": (Full(), Kivi(2, 2, 8, 16)),
}


def method(name: str) -> Method:
    return Method(name, *METHODS[name])


@contextmanager
def watched(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """One argument of every call of a module: by its name, or the first where it was given by place."""
    calls: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        calls.append(kwargs[name] if name in kwargs else args[0])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("name", METHODS)
def test_the_next_token_takes_the_position_of_tokens_seen(name: str) -> None:
    """As the model's layers are told: after evictions too, and through a question of 5."""
    model, ids = exact_llama(4, 2), random_ids(2, 70)
    check_model(model, method(name).rule)  # runs the model once to see how it rotates keys
    with watched(model.model.layers[0], "position_ids") as told:
        cache = build_cache(model, method(name), ids[:, :40], 30, max_step=5)
        at, want = 40, [list(range(40))]
        for q in [*[1] * 10, 5, *[1] * 10]:
            step(model, ids[:, at : at + q], cache)
            want.append(list(range(at, at + q)))
            at += q
    assert [call[0].tolist() for call in told] == want


@pytest.mark.parametrize("name", METHODS)
def test_seen_kept_and_mask_sizes(name: str) -> None:
    model, ids = exact_llama(4, 2, layers=1), random_ids(1, 60)
    cache = build_cache(model, method(name), ids[:, :40], 20)
    for at in range(40, 60):
        kept = 16 if METHODS[name][0].budget else at
        assert cache.get_seq_length() == at
        assert cache.kept_tokens == kept
        assert cache.get_mask_sizes(3, 0) == (kept + 3, at - kept)
        step(model, ids[:, at : at + 1], cache)


@pytest.mark.parametrize("n_sink", [1, 4])
def test_sinks_are_never_lost(n_sink: int) -> None:
    """Through 200 steps with questions between, so that the window's slots are reused in every order."""
    model, ids = exact_llama(4, 2, layers=1), random_ids(1, 300)
    rule = StreamingLLM(budget=12, n_sink=n_sink)
    cache = build_cache(model, Method("s", rule, DENSE), ids[:, :30], 270, max_step=7)
    at = 30
    for i in range(200):
        q = 7 if i % 20 == 3 else 1
        step(model, ids[:, at : at + q], cache)
        at += q
        want = [*range(n_sink), *range(at - (12 - n_sink), at)]
        assert cache.layers[0].kept_positions().tolist() == [[want] * 2]


def test_sinks_stay_where_all_scores_tie() -> None:
    """All queries zero: every probability is uniform, so that scores of equally old tokens tie in every head."""
    model, ids = exact_llama(4, 2, layers=1), random_ids(1, 80)
    model.model.layers[0].self_attn.q_proj.weight.zero_()
    for rule in (StreamingLLM(budget=12), StreamingLLM(budget=12, variant="absolute")):
        cache = build_cache(model, Method("s", rule, DENSE), ids[:, :30], 50)
        for at in range(30, 80):
            step(model, ids[:, at : at + 1], cache)
            assert cache.layers[0].kept_positions()[0, 0].tolist() == [*range(4), *range(at - 7, at + 1)]


# ---------------------------------------------------------------- positions processed


def counted(model: LlamaForCausalLM, rule: KeepRule, prompt: int, total: int) -> tuple[list[int], AnyCache]:
    """Positions that went through the embedding in each forward, from the prompt's on, and the cache."""
    ids = random_ids(1, total)
    with watched(model.model.embed_tokens, "input") as calls:
        cache = build_cache(model, Method("m", rule, DENSE), ids[:, :prompt])
        for at in range(prompt, total):
            step(model, ids[:, at : at + 1], cache)
    return [call.shape[1] for call in calls], cache


def test_four_five_six_without_a_cache_and_four_one_one_with_one() -> None:
    model = exact_llama(4, 2, layers=1)
    for rule, want in ((Recompute(), [4, 5, 6]), (Full(), [4, 1, 1]), (H2O(budget=2), [4, 1, 1])):
        got, cache = counted(model, rule, 4, 6)
        assert got == want
        assert cache.positions_processed == sum(want)


def test_prefixes_of_two_to_a_hundred_tokens() -> None:
    """5,049 positions without a cache, 100 with one, counted as they run."""
    model = exact_llama(4, 2, layers=1)
    for rule, want in ((Recompute(), 5049), (Full(), 100)):
        got, cache = counted(model, rule, 2, 100)
        assert sum(got) == want
        assert cache.positions_processed == want


def test_recompute_holds_no_keys() -> None:
    model, ids = exact_llama(4, 2, layers=1), random_ids(2, 20)
    prompt = ids[:, :15].clone()
    cache = build_cache(model, Method("recompute", Recompute(), DENSE), prompt)
    prompt.zero_()  # the ids are a copy as well
    assert isinstance(cache, RecomputeCache)
    step(model, ids[:, 15:16], cache)
    assert list(cache.buffers()) == [] and cache.kept_tokens == 0 and not cache.has_compressed
    assert torch.equal(cache.ids, ids[:, :16])


# ---------------------------------------------------------------- state


def storages(cache: KVCache) -> set[int]:
    return {buffer.tensor.untyped_storage().data_ptr() for buffer in cache.buffers()} - {0}


def run(model: LlamaForCausalLM, cache: AnyCache, ids: Tensor) -> Tensor:
    return torch.cat([step(model, ids[:, t : t + 1], cache) for t in range(ids.shape[1])], dim=1)


def tensors(record: PrefillRecord) -> list[Tensor]:
    found = [record.ids, record.logits]
    for layer in record.layers:
        found += [layer.key, layer.value, *layer.observed.values()]
    return found


def test_caches_of_one_record_share_nothing() -> None:
    """Any two caches and the record have separate storages; running one changes neither the others nor the record."""
    model, ids = exact_llama(4, 2), random_ids(2, 60)
    record = prefill(model, ids[:, :40], [METHODS[name][0] for name in METHODS])
    before = [tensor.clone() for tensor in tensors(record)]
    caches = {name: build_cache(model, method(name), record, 20) for name in METHODS}
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors(record)}
    for cache in caches.values():
        mine = {*storages(cache), cache.last_logits.untyped_storage().data_ptr()}
        assert not mine & held
        held |= mine
    in_turn = {name: run(model, cache, ids[:, 40:]) for name, cache in caches.items()}
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(record), strict=True))
    for name in reversed(METHODS):
        fresh = build_cache(model, method(name), ids[:, :40], 20)
        assert torch.equal(run(model, fresh, ids[:, 40:]), in_turn[name])


def test_interleaving_caches_changes_nothing() -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 60)
    record = prefill(model, ids[:, :40], [METHODS[name][0] for name in METHODS])
    alone = {n: run(model, build_cache(model, method(n), record, 20), ids[:, 40:]) for n in METHODS}
    caches = {name: build_cache(model, method(name), record, 20) for name in METHODS}
    rounds = [{n: step(model, ids[:, t : t + 1], cache) for n, cache in caches.items()} for t in range(40, 60)]
    for name in METHODS:
        assert torch.equal(torch.cat([r[name] for r in rounds], dim=1), alone[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_second_prompt_finds_nothing_of_the_first(name: str) -> None:
    model, first, second = exact_llama(4, 2), random_ids(2, 60), random_ids(2, 50, seed=1)
    run(model, build_cache(model, method(name), first[:, :40], 20), first[:, 40:])
    got = run(model, build_cache(model, method(name), second[:, :30], 20), second[:, 30:])
    fresh = exact_llama(4, 2)
    assert torch.equal(got, run(fresh, build_cache(fresh, method(name), second[:, :30], 20), second[:, 30:]))


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_do_not_see_each_other(name: str) -> None:
    """Three prompts together give what each gives alone."""
    model, ids = exact_llama(6, 2), random_ids(3, 60)
    together = run(model, build_cache(model, method(name), ids[:, :40], 20), ids[:, 40:])
    for row in range(3):
        one = ids[row : row + 1]
        alone = run(model, build_cache(model, method(name), one[:, :40], 20), one[:, 40:])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-9, rtol=0)


def test_the_record_survives_generation() -> None:
    """Answers of one cache do not reach the next question's."""
    model, ids = exact_llama(4, 2), random_ids(1, 40)
    record = prefill(model, ids, [H2O(budget=16)])
    questions = [random_ids(1, 5, seed=s) for s in (1, 2)]
    h2o = method("h2o")

    def answer(question: Tensor) -> list[int]:
        cache = build_cache(model, h2o, record, 20, max_step=5)
        return generate(model, question, cache, 8)[0].tolist()

    forwards = [answer(q) for q in questions]
    assert [answer(q) for q in reversed(questions)] == forwards[::-1]
