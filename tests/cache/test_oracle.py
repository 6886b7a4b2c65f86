"""Each method against a slow whole-model reference, step by step, far past several evictions and flushes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared import slow_llama as slow
from tests.shared.families import exact_llama, random_ids
from tests.shared.models import random_llama

pytestmark = pytest.mark.engine

ONE_BY_ONE = [1] * 300
QUESTIONS = [*[1] * 120, 7, *[1] * 100, 10, 3, *[1] * 80]
"""302 forwards: single tokens, with questions of 7, 10 and 3 tokens between them."""


@dataclass
class Case:
    """A method of the engine and the settings of its slow reference."""

    rule: KeepRule
    store: Store
    kind: type[slow.History]
    settings: dict[str, object]


def evicting(rule: KeepRule, keeps: slow.Keeps, bits: int = 0, **settings: object) -> Case:
    """A rule with a token budget over a dense store, or over per-token codes."""
    store = PerToken(bits, bits, group_size=16) if bits else DenseStore()
    settings = {"budget": rule.budget, "keeps": keeps, "bits": bits, "group": 16} | settings
    return Case(rule, store, slow.EvictingHistory, settings)


def kivi(bits: int, group: int, residual: int) -> Case:
    settings = {"bits": bits, "group": group, "residual": residual}
    return Case(Full(), Kivi(bits, bits, group, residual), slow.KiviHistory, settings)


def per_token(bits: int) -> Case:
    return Case(Full(), PerToken(bits, bits, 16), slow.PerTokenHistory, {"bits": bits, "group": 16})


def follow(
    case: Case,
    heads: tuple[int, int],
    prompt: int,
    schedule: list[int],
    batch: int = 1,
    max_step: int | None = None,
    head_dim: int = 16,
) -> tuple[KVCache, list[slow.History]]:
    """Decode with the engine and with the reference; compare logits and what is held after every forward."""
    model = exact_llama(*heads, head_dim)
    reference = slow.SlowLlama(model)
    ids = random_ids(batch, prompt + sum(schedule))
    method = Method("case", case.rule, case.store)
    cache = build_cache(model, method, ids[:, :prompt], sum(schedule), max_step or max(schedule))
    histories = reference.histories(case.kind, **case.settings)
    close(cache.last_logits, reference(ids[:, :prompt], histories)[:, -1], "prompt")
    same_state(cache, histories, "prompt")
    at = prompt
    for q in schedule:
        chunk = ids[:, at : at + q]
        close(step(model, chunk, cache, logits_to_keep=0), reference(chunk, histories), f"token {at}")
        at += q
        same_state(cache, histories, f"token {at}")
    same_scores(cache, histories)
    return cache, histories


def close(got: Tensor, want: Tensor, where: str, atol: float = 1e-8) -> None:
    assert got.isfinite().all(), where
    torch.testing.assert_close(got, want, atol=atol, rtol=0, msg=lambda m: f"{where}: {m}")


def same_state(cache: KVCache, histories: list[slow.History], where: str) -> None:
    """Kept positions of every row and head; quantised counts of a KIVI store."""
    for layer, history in zip(cache.layers, histories, strict=True):
        assert layer.get_seq_length() == history.seen, where
        assert layer.kept_positions().tolist() == history.kept(), where
        if isinstance(history, slow.KiviHistory):
            counts = layer.slots.keys.groups.length, layer.slots.values.groups.length
            assert counts == (history.quantised_keys, history.quantised_values), where


def same_scores(cache: KVCache, histories: list[slow.History]) -> None:
    """The score of every kept token, wherever its slot is."""
    for layer, history in zip(cache.layers, histories, strict=True):
        if not isinstance(history, slow.EvictingHistory) or history.scores is None:
            continue
        for b, batch in enumerate(history.kept()):
            for h, positions in enumerate(batch):
                slot_of = {p: slot for slot, p in enumerate(layer.position[b, h].tolist())}
                got = layer.scores[b, h, [slot_of[p] for p in positions]]
                torch.testing.assert_close(got, history.scores[b, h, positions], atol=0, rtol=1e-6)


ABSOLUTE = StreamingLLM(budget=40, variant="absolute")
CASES = {
    "full": Case(Full(), DenseStore(), slow.History, {}),
    "kivi8": kivi(8, 16, 64),
    "kivi4": kivi(4, 16, 32),
    "kivi2": kivi(2, 8, 40),
    "int8": per_token(8),
    "int4": per_token(4),
    "int2": per_token(2),
    "h2o-sum": evicting(H2O(budget=40), slow.h2o_keeps(), combine="sum"),
    "h2o-max": evicting(H2O(budget=40, recent=9, combine="max"), slow.h2o_keeps(9), combine="max"),
    "h2o-int4": evicting(H2O(budget=40), slow.h2o_keeps(), bits=4, combine="sum"),
    "streaming_llm": evicting(StreamingLLM(budget=40), slow.streaming_keeps(4), in_cache=True),
    "streaming_llm-absolute": evicting(ABSOLUTE, slow.streaming_keeps(4)),
    "streaming_llm-int8": evicting(ABSOLUTE, slow.streaming_keeps(4), bits=8),
    "random": evicting(Random(budget=40, seed=5), slow.random_keeps(5)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_method_with_grouped_heads_and_questions(name: str) -> None:
    """GQA 6/2, batch 3, a prompt beyond budget and residual, questions of several tokens between single ones."""
    cache, _ = follow(CASES[name], (6, 2), 70, QUESTIONS, batch=3, max_step=10)
    assert cache.has_compressed == (name != "full")
    assert cache.positions_processed == 70 + sum(QUESTIONS)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "mqa"])
@pytest.mark.parametrize("name", ["full", "kivi2", "int4", "h2o-sum", "h2o-max", "streaming_llm"])
def test_other_head_layouts_token_by_token(name: str, heads: tuple[int, int]) -> None:
    """MHA 4/4 and MQA 4/1, single tokens only: every eviction is reused in place by the next token."""
    follow(CASES[name], heads, 70, ONE_BY_ONE, max_step=1)


@pytest.mark.parametrize("name", ["h2o-sum", "h2o-int4", "streaming_llm", "random", "kivi4", "int2"])
def test_prompt_shorter_than_budget_and_residual(name: str) -> None:
    """A prompt of 9 tokens, below the budget and below R: the cache fills up first and compresses later."""
    cache, _ = follow(CASES[name], (6, 2), 9, [*[1] * 20, 6, 8, *[1] * 60], batch=2, max_step=8)
    assert cache.has_compressed


@pytest.mark.parametrize("prompt", [100, 128, 200])
def test_kivi_around_a_residual_of_128(prompt: int) -> None:
    """T < R, T = R and T > R with the paper's R = 128, 300 steps: two or three flushes after the prompt."""
    follow(kivi(4, 32, 128), (2, 1), prompt, ONE_BY_ONE, head_dim=64)


@pytest.mark.parametrize("name", ["h2o-sum", "streaming_llm", "random"])
def test_budget_of_one_less_than_the_prompt(name: str) -> None:
    case = CASES[name]
    cache, histories = follow(case, (6, 2), 41, [1] * 60, batch=2)
    assert case.rule.budget == 40
    assert all(len(row) == 40 for history in histories for batch in history.kept() for row in batch)
    assert cache.kept_tokens == 40


def rule_name(rule: KeepRule) -> str:
    return f"{rule.name}-{rule.budget}"


@pytest.mark.parametrize(
    "rule", [H2O(budget=2), H2O(budget=3, recent=2), StreamingLLM(budget=5), Random(budget=6)], ids=rule_name
)
def test_smallest_budgets(rule: KeepRule) -> None:
    keeps = {
        "H2O": slow.h2o_keeps(getattr(rule, "recent", None)),
        "StreamingLLM": slow.streaming_keeps(4),
        "Random": slow.random_keeps(0),
    }[rule.name]
    settings = {"combine": "sum"} if rule.name == "H2O" else {"in_cache": rule.name == "StreamingLLM"}
    follow(evicting(rule, keeps, **settings), (6, 2), 30, [*[1] * 20, 4, *[1] * 20], batch=2)


def test_streaming_without_sinks_and_with_one() -> None:
    for n_sink in (0, 1):
        rule = StreamingLLM(budget=24, n_sink=n_sink)
        follow(evicting(rule, slow.streaming_keeps(n_sink), in_cache=True), (4, 2), 30, [1] * 40)


@pytest.mark.parametrize(
    "rule", [H2O(budget=200), H2O(budget=400), StreamingLLM(budget=200), Random(budget=200)], ids=rule_name
)
def test_budget_that_is_never_exceeded_equals_full(rule: KeepRule) -> None:
    case = Case(rule, DenseStore(), slow.History, {})
    cache, _ = follow(case, (6, 2), 120, [*[1] * 40, 5, *[1] * 35], batch=2)
    assert not cache.has_compressed


def test_constant_groups_give_the_stored_minimum() -> None:
    """Layer 0 has keys and values that are all zero: no group has a range."""
    model = exact_llama(4, 2)
    model.model.layers[0].self_attn.v_proj.weight.zero_()
    model.model.layers[0].self_attn.k_proj.weight.zero_()
    ids = random_ids(2, 120)
    evicted = evicting(H2O(budget=20), slow.h2o_keeps(), bits=2, combine="sum")
    for case in (kivi(2, 8, 16), per_token(2), evicted):
        reference = slow.SlowLlama(model)
        histories = reference.histories(case.kind, **case.settings)
        cache = build_cache(model, Method("case", case.rule, case.store), ids[:, :40], 80)
        reference(ids[:, :40], histories)
        for at in range(40, 120):
            chunk = ids[:, at : at + 1]
            close(step(model, chunk, cache), reference(chunk, histories), f"token {at}")


def test_recompute_is_a_plain_forward_over_the_whole_prefix() -> None:
    """300 steps; the reference is the full history, since recomputing changes nothing but the work."""
    model = exact_llama(4, 2, layers=1)
    reference = slow.SlowLlama(model)
    histories = reference.histories()
    ids = random_ids(1, 312)
    cache = build_cache(model, Method("recompute", Recompute(), DenseStore()), ids[:, :5])
    close(cache.last_logits, reference(ids[:, :5], histories)[:, -1], "prompt")
    at = 5
    for q in [*[1] * 150, 7, *[1] * 150]:
        chunk = ids[:, at : at + q]
        close(step(model, chunk, cache, logits_to_keep=0), reference(chunk, histories), f"token {at}")
        at += q


@pytest.mark.parametrize("name", ["full", "streaming_llm"])
def test_plain_float32_model(name: str) -> None:
    """In float32, norms and angles as transformers computes them; looser, and only where nothing is rounded
    to codes or decided by score."""
    model = random_llama(6, 2, 32, dtype=torch.float32)
    case = CASES[name]
    reference = slow.SlowLlama(model)
    histories = reference.histories(case.kind, **case.settings)
    ids = random_ids(2, 170)
    cache = build_cache(model, Method(name, case.rule, case.store), ids[:, :70], 100)
    close(cache.last_logits.double(), reference(ids[:, :70], histories)[:, -1], "prompt", atol=1e-3)
    for at in range(70, 170):
        chunk = ids[:, at : at + 1]
        close(step(model, chunk, cache).double(), reference(chunk, histories), f"token {at}", atol=1e-3)
    same_state(cache, histories, "end")


# ---------------------------------------------------------------- StreamingLLM from other definitions


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=["gqa", "mha", "mqa"])
def test_absolute_positions_equal_one_masked_forward(heads: tuple[int, int]) -> None:
    """One forward over all tokens with the mask `j < n_sink or j >= i - window`, no cache anywhere."""
    n_sink, window, total = 4, 28, 340
    model = exact_llama(*heads)
    ids = random_ids(2, total)
    row, column = torch.arange(total)[:, None], torch.arange(total)[None]
    mask = (column <= row) & ((column < n_sink) | (column >= row - window))
    want = slow.masked_forward(model, ids, mask)
    rule = StreamingLLM(budget=n_sink + window, n_sink=n_sink, variant="absolute")
    cache = build_cache(model, Method("streaming_llm", rule, DenseStore()), ids[:, :1], max_new_tokens=total)
    close(cache.last_logits, want[:, 0], "prompt")
    for at in range(1, total):
        close(step(model, ids[:, at : at + 1], cache)[:, 0], want[:, at], f"token {at}")


def test_absolute_positions_equal_the_stock_model_with_that_mask() -> None:
    """Against transformers' own eager attention, given the mask as a bias (its softmax is float32)."""
    n_sink, window, total = 3, 20, 120
    model = exact_llama(6, 2)
    ids = random_ids(1, total)
    row, column = torch.arange(total)[:, None], torch.arange(total)[None]
    mask = (column <= row) & ((column < n_sink) | (column >= row - window))
    bias = torch.zeros(total, total, dtype=torch.float64).masked_fill(~mask, -1e9)[None, None]
    model.set_attn_implementation("eager")
    want = model(input_ids=ids, attention_mask=bias, use_cache=False).logits
    rule = StreamingLLM(budget=n_sink + window, n_sink=n_sink, variant="absolute")
    cache = build_cache(model, Method("streaming_llm", rule, DenseStore()), ids[:, :2], max_new_tokens=total)
    for at in range(2, total):
        got = step(model, ids[:, at : at + 1], cache)[:, 0]
        torch.testing.assert_close(got, want[:, at], atol=1e-4, rtol=0)


def test_in_cache_positions_differ_from_absolute_ones() -> None:
    """The two variants keep the same tokens and must not give the same numbers."""
    model = exact_llama(6, 2)
    ids = random_ids(1, 200)
    rules = [StreamingLLM(budget=32, variant=variant) for variant in ("in_cache", "absolute")]
    caches = [build_cache(model, Method("s", rule, DenseStore()), ids[:, :60], 140) for rule in rules]
    for at in range(60, 200):
        first, second = (step(model, ids[:, at : at + 1], cache) for cache in caches)
    assert caches[0].layers[0].kept_positions().tolist() == caches[1].layers[0].kept_positions().tolist()
    assert (first - second).abs().max() > 0.1
