"""The base of keep rules: protected tokens, smallest budgets, scores by values, missing scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache, build_layer, prefill
from kvbench.cache.caches import KVCache
from kvbench.cache.captured import DecodeStep
from kvbench.cache.decode import step
from kvbench.cache.graph import GraphDecoder
from kvbench.cache.layer import SlotLayer
from kvbench.cache.plan import plan_layer
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import rotate_back
from kvbench.cache.rule import EMPTY, KEEP, NO_SCORES, KeepRule, keep_best, keep_best_of_heads
from kvbench.cache.rule_settings import whole
from kvbench.cache.store import DenseStore
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.kernels.prefill import Scoring
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.knorm import KNorm
from kvbench.methods.lagkv import LagKV
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.random import Random
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import exact_llama, random_ids
from tests.shared.observing import observed_of
from tests.shared.paths import ROOT
from tests.shared.tape import TapeRecorder

B, HQ, HKV, D, PROMPT, TOKENS = 2, 4, 2, 16, 60, 90


def yaml_of(name: str) -> str:
    """conf/method/NAME.yaml, without its comments."""
    lines = (ROOT / "conf" / "method" / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


# Settings that papers give for thousands of tokens, small enough for this prompt.
SMALL: dict[str, Any] = {"window": 4, "pool": 3, "block": 3, "future": 8}
EVICTING = [name for name in BUILT_IN.names("method") if "${budget}" in yaml_of(name)]
TURN = rotate_back(exact_llama(1, 1, D, layers=1), 0)


def test_every_rule_that_evicts_is_tested() -> None:
    assert len(EVICTING) >= 10 and {"h2o", "adakv", "random", "streaming_llm"} <= set(EVICTING)


def small(name: str, **settings: Any) -> KeepRule:
    """The rule of conf/method/NAME.yaml at a budget of 600, with small settings."""
    rule = load_method(name, budget=600).rule
    if isinstance(rule, AdaKV):
        return replace(rule, inner=replace(rule.inner, window=4, pool=3), **settings)
    return replace(rule, **{key: SMALL[key] for key in SMALL if hasattr(rule, key)}, **settings)


def with_budget(rule: KeepRule, budget: int | float) -> KeepRule:
    if isinstance(rule, AdaKV):
        return replace(rule, budget=budget, inner=replace(rule.inner, budget=budget))
    return replace(rule, budget=budget)


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one layer."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(B, heads, TOKENS, D, generator=generator) for heads in (HQ, HKV, HKV))
    return query, key, value


def build(rule: KeepRule, tensors: tuple[Tensor, Tensor, Tensor], index: int, layers: int) -> SlotLayer | RaggedLayer:
    """The layer after its prompt of the first `PROMPT` tokens."""
    query, key, value = (x[:, :, :PROMPT] for x in tensors)
    scoring = Scoring(D**-0.5)
    observed = observed_of(rule, query, key, scoring, TURN)
    record = LayerRecord(index, key, value, scoring, observed, TURN)
    plan = plan_layer(Method("m", rule, DenseStore()), record, layers)
    return build_layer(record, replace(plan, max_new_tokens=TOKENS, step=3))


def kept_of(layer: SlotLayer | RaggedLayer) -> list[set[int]]:
    """Kept positions of each batch row and head."""
    return [set(head.tolist()) - {EMPTY} for row in layer.kept_positions() for head in row]


def decode(layer: SlotLayer | RaggedLayer, tensors: tuple[Tensor, Tensor, Tensor], steps: tuple[int, ...]) -> Any:
    """Outputs of forwards of so many tokens, with the kept positions after each."""
    query, key, value = tensors
    at = PROMPT
    for q in steps:
        rows = slice(at, at + q)
        layer.update(key[:, :, rows], value[:, :, rows])
        yield layer.attend(query[:, :, rows], Scoring(D**-0.5)), kept_of(layer)
        at += q


# protected tokens


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("first, last", [(3, None), (None, 9), (3, 9), (7, 2)])
@pytest.mark.parametrize("name", EVICTING)
def test_protected_tokens_stay_at_the_smallest_budget(name: str, first: int, last: int, layer: int) -> None:
    """After the prompt and after every step, in the first and the last of five layers."""
    rule = small(name, protect_first=first, protect_last=last)
    rule = with_budget(rule, rule.smallest_budget)
    tensors = draw()
    built = build(rule, tensors, layer, 5)
    always, newest = set(range(first or 0)), PROMPT
    assert all(always | set(range(newest - (last or 1), newest)) <= kept for kept in kept_of(built)), name
    for q, (_, rows) in zip((1, 1, 3, 1), decode(built, tensors, (1, 1, 3, 1)), strict=True):
        newest += q
        assert all(always | set(range(newest - (last or 1), newest)) <= kept for kept in rows), name


@pytest.mark.parametrize("name", EVICTING)
def test_a_budget_below_the_protected_tokens_is_refused(name: str) -> None:
    rule = small(name, protect_first=40, protect_last=50)
    smallest = rule.smallest_budget
    assert smallest >= 90
    with pytest.raises(UserError, match=rf"budget={smallest - 1} .*40 sinks.*type budget={smallest} or more"):
        with_budget(rule, smallest - 1)


@pytest.mark.parametrize("name", EVICTING)
def test_no_protection_and_protection_of_nothing_are_equal_to_the_bit(name: str) -> None:
    rule = with_budget(small(name), 30)
    assert rule.protect_first is rule.protect_last is None
    other, tensors = replace(rule, protect_first=0, protect_last=0), draw(1)
    plain, same = (build(each, tensors, 0, 2) for each in (rule, other))
    assert kept_of(plain) == kept_of(same)
    for (a, kept), (b, also) in zip(decode(plain, tensors, (1, 2, 1)), decode(same, tensors, (1, 2, 1)), strict=True):
        assert torch.equal(a, b) and kept == also


@pytest.mark.parametrize("name", EVICTING)
def test_every_rule_reads_the_two_knobs(name: str) -> None:
    rule = load_method(name, budget=600, protect_first=5, protect_last=70).rule
    assert (rule.protect_first, rule.protect_last) == (5, 70)
    assert rule.fixed_parts()[0][0] == max(5, getattr(rule, "n_sink", 0))


def test_protection_changes_which_tokens_a_rule_keeps() -> None:
    """The tests above cannot pass because the rule keeps these tokens anyway."""
    for rule in (KNorm(30), Random(30)):
        tensors = draw(2)
        plain, protected = (build(each, tensors, 0, 1) for each in (rule, replace(rule, protect_first=8)))
        assert not all(set(range(8)) <= kept for kept in kept_of(plain))
        assert all(set(range(8)) <= kept for kept in kept_of(protected))


def test_first_tokens_that_are_protected_count_as_sinks() -> None:
    assert StreamingLLM(20, protect_first=6).sinks_in_place == 6
    assert StreamingLLM(20, protect_first=2).sinks_in_place == 4
    assert StreamingLLM(20, variant="absolute", protect_first=6).sinks_in_place == 0


def test_protected_first_tokens_come_before_the_even_split() -> None:
    assert [H2O(30, protect_first=first).last_tokens(30) for first in (None, 0, 6)] == [15, 15, 12]
    assert H2O(30, recent=4, protect_last=9).last_tokens(30) == H2O(30, recent=9, protect_last=4).last_tokens(30) == 9
    assert H2O(30, protect_last=9).last_tokens(30) == 15


def test_pyramid_moves_only_the_budget_that_is_not_protected() -> None:
    rule = Pyramid(64, window=8, protect_first=4)
    counts = [rule.layer_tokens(1000, layer, 5) for layer in range(5)]
    assert sum(counts) == 5 * 64 and min(counts) >= 12


def test_adakv_protects_what_its_inner_rule_protects_and_the_other_way_round() -> None:
    rule = AdaKV(64, inner=H2O(64), protect_first=4)
    assert rule.inner == H2O(64, protect_first=4)
    assert AdaKV(64, inner=H2O(64, protect_first=4)).smallest_budget == rule.smallest_budget == 6


class OwnPriority(KeepRule):
    """Overrides `priority` as a whole."""

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return position.to(torch.float64)


def test_a_rule_that_overrides_priority_is_refused_protection() -> None:
    assert OwnPriority(8, protect_first=0).budget == 8
    for knob in ("protect_first", "protect_last"):
        with pytest.raises(UserError, match=f"{knob}=4 for OwnPriority.*evictable_priority"):
            OwnPriority(8, **{knob: 4})


# smallest budgets


@dataclass(frozen=True)
class Everything(KeepRule):
    """Declares every kind of protection."""

    n_sink: int = whole(2, least=0, knob="sinks", protects="first")
    recent: int | None = whole(None, least=1, protects="last")

    recent_half = True
    pick = "one token in between"


@pytest.mark.parametrize(
    ("rule", "smallest", "words"),
    [
        (KeepRule(99), 1, "the newest token"),
        (StreamingLLM(99), 5, "4 sinks and the newest token"),
        (StreamingLLM(99, n_sink=0), 1, "the newest token"),
        (H2O(99), 2, "the newest token and one heavy hitter"),
        (H2O(99, recent=8), 9, "the 8 newest tokens and one heavy hitter"),
        (SnapKV(99), 33, "the 32 newest tokens and one picked token"),
        (LagKV(999), 260, "4 sinks and the last block of 128 and the tokens after it"),
        (Everything(99), 4, "2 sinks, the newest token and one token in between"),
        (Everything(99, recent=5, protect_first=3), 9, "3 sinks, the 5 newest tokens and one token in between"),
    ],
)
def test_smallest_budget_and_its_words_follow_from_the_settings(rule: KeepRule, smallest: int, words: str) -> None:
    assert (rule.smallest_budget, rule.fixed_part) == (smallest, words)


def test_protected_tokens_get_the_priority_keep() -> None:
    rule, position = Everything(11, protect_last=3), torch.arange(20).view(1, 1, -1)
    priority = rule.priority(NO_SCORES, position, 19, 11, 0).flatten().tolist()
    assert [p for p, value in enumerate(priority) if value == KEEP] == [0, 1, 16, 17, 18, 19]
    assert priority[2:16] == [float(p) for p in range(2, 16)]


# scores


@dataclass(frozen=True)
class ValueNorm(KeepRule):
    """Keeps the tokens whose values have the largest norm."""

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.fresh_scores(record.key, record.value)

    def fresh_scores(self, key: Tensor, value: Tensor) -> Tensor:
        norm: Tensor = value.to(torch.float32).norm(dim=-1)
        return norm


def loop_over_values(value: Tensor, budget: int) -> dict[int, list[list[set[int]]]]:
    """By token: positions that each row and head keeps after it. The smallest value is evicted, never the newest."""
    norms = value.to(torch.float32).norm(dim=-1).tolist()
    kept = [[set[int]() for _ in heads] for heads in norms]
    after = {}
    for t in range(value.shape[2]):
        for b, heads in enumerate(kept):
            for h, positions in enumerate(heads):
                if len(positions) == budget and t > PROMPT - 1:
                    positions.add(t)
                    positions.remove(min(positions - {t}, key=lambda p, b=b, h=h: (norms[b][h][p], p)))
                else:
                    positions.add(t)
                if t == PROMPT - 1:
                    ranked = sorted(positions - {t}, key=lambda p, b=b, h=h: (norms[b][h][p], p), reverse=True)
                    heads[h] = {t, *ranked[: budget - 1]}
        after[t] = [[set(positions) for positions in heads] for heads in kept]
    return after


@pytest.mark.parametrize("path", ["slots", "blocks per head", "captured"])
def test_a_rule_that_scores_by_values_evicts_during_decode(path: str) -> None:
    """Against a loop over the values of a one-layer model, which do not depend on what was evicted."""
    model, ids, budget = exact_llama(4, 2, D, layers=1), random_ids(2, TOKENS), 12
    inner = ValueNorm(budget)
    rule = AdaKV(budget, inner=inner, floor=1) if path == "blocks per head" else inner
    expected = loop_over_values(prefill(model, ids).layers[0].value, budget)
    cache = build_cache(model, Method("m", rule, DenseStore()), ids[:, :PROMPT], TOKENS - PROMPT, kernel="reference")
    assert isinstance(cache, KVCache)
    assert isinstance(cache.layers[0], RaggedLayer if path == "blocks per head" else SlotLayer)
    decoder = GraphDecoder(model, cache, DecodeStep(model, cache), TapeRecorder) if path == "captured" else None
    came: set[int] = set()
    for t in range(PROMPT, TOKENS):
        token = ids[:, t : t + 1]
        _ = decoder.feed(token) if decoder else step(model, token, cache)
        kept = [[set(head.tolist()) - {EMPTY} for head in row] for row in cache.layers[0].kept_positions()]
        assert kept == expected[t], f"token {t}"
        came |= {t} & kept[0][0]
        assert all(len(head) == budget for row in kept for head in row)
    assert len(came) == TOKENS - PROMPT  # each was newest once, and most of them went again
    assert len(kept[0][0] & came) < len(came)


class NoScoresGiven(KNorm):
    """Scores the first layer only."""

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return super().initial_scores(record) if record.index == 0 else None  # type: ignore[return-value]


def test_missing_scores_are_refused_with_the_method_to_write() -> None:
    tensors = draw()
    build(NoScoresGiven(12), tensors, 0, 2)
    with pytest.raises(UserError, match=r"NoScoresGiven evicts by scores.*initial_scores") as error:
        build(NoScoresGiven(12), tensors, 1, 2)
    assert "\n" not in str(error.value)
    assert not Full().keeps_scores and KNorm(8).keeps_scores


# the best of a prompt


def test_the_best_of_each_head() -> None:
    priority = torch.tensor([[[3.0, 1.0, 2.0, 1.0], [math.inf, 0.0, 0.0, 5.0]]])
    kept = keep_best_of_heads(priority, torch.tensor([[3, 2]]))
    assert kept.tolist() == [[[True, False, True, True], [True, False, False, True]]]
    assert keep_best(priority, 3).tolist() == [[[0, 2, 3], [0, 2, 3]]]


def test_public_names_are_those_of_the_engine() -> None:
    assert kvbench.KeepRule is KeepRule and kvbench.KEEP == KEEP
    assert kvbench.Method is Method and issubclass(DenseStore, kvbench.Store)
    assert all(isinstance(o, kvbench.Observation) for o in H2O(8).observations())
    assert set(kvbench.__all__) == set(kvbench._HOMES)
