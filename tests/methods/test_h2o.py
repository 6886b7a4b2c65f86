"""H2O: who is given up, by hand and on models; scores from birth; the span of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import step
from kvbench.cache.rule import EMPTY, KEEP, keep_best, lowest
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.methods.h2o import H2O
from tests.shared.families import exact_llama, random_ids

DENSE = DenseStore()


def kept_of(scores: list[float], budget: int, **knobs: object) -> list[int]:
    """What H2O keeps of a prompt with these scores."""
    position = torch.arange(len(scores)).view(1, 1, -1)
    rule = H2O(budget=budget, **knobs)
    priority = rule.priority(torch.tensor(scores).view(1, 1, -1), position, len(scores) - 1, budget, 0)
    return keep_best(priority, budget)[0, 0].tolist()


def test_heavy_and_recent_by_hand() -> None:
    scores = [5.0, 1.0, 9.0, 2.0, 8.0, 0.1, 0.2, 0.3]
    assert kept_of(scores, 4) == [2, 4, 6, 7]
    assert kept_of(scores, 5) == [0, 2, 4, 6, 7]  # the odd one is a heavy hitter
    assert kept_of(scores, 4, recent=1) == [0, 2, 4, 7]
    assert kept_of(scores, 4, recent=3) == [2, 5, 6, 7]


def test_of_equal_scores_the_older_is_given_up() -> None:
    assert kept_of([1.0] * 8, 4) == [4, 5, 6, 7]
    assert kept_of([2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 5) == [0, 3, 4, 6, 7]


def test_scores_that_tie_in_bfloat16_are_told_apart() -> None:
    scores = [1.0, 1.0 + 2**-20, 1.0 + 2**-21, 1.0 + 2**-19, 0.0, 0.0]
    assert len({torch.tensor(s).bfloat16().item() for s in scores[:4]}) == 1
    assert kept_of(scores, 4) == [1, 3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=12), st.data())
def test_victims_of_any_slots(levels: list[int], data: st.DataObject) -> None:
    """Against sorting (priority, position) pairs: with ties, protected slots, holes, and slots in any order."""
    n = len(levels)
    position = data.draw(st.permutations(range(n)))
    is_hole = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    priority = [KEEP if level == 4 else float(level) for level in levels]
    occupied = [i for i in range(n) if not is_hole[i]]
    evictable = [i for i in occupied if priority[i] < KEEP]
    assume(evictable)
    count = data.draw(st.integers(1, len(evictable)))
    got = lowest(
        torch.tensor([[priority]]),
        torch.tensor([[[EMPTY if hole else p for p, hole in zip(position, is_hole, strict=True)]]], dtype=torch.int32),
        count,
    )
    want = sorted(evictable, key=lambda i: (priority[i], position[i]))[:count]
    assert got[0, 0].tolist() == want


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=15), st.data())
def test_best_of_any_prompt(levels: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(levels)))
    want = sorted(sorted(range(len(levels)), key=lambda i: (levels[i], i))[len(levels) - count :])
    assert keep_best(torch.tensor([[[float(v) for v in levels]]]), count)[0, 0].tolist() == want


# ---------------------------------------------------------------- on models


@dataclass(frozen=True)
class Watched(H2O):
    """H2O that notes how many tokens each step's attention gave something to, per layer call."""

    spans: list[int] = field(default_factory=list, compare=False)

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        self.spans.append(int((probabilities > 0).any(dim=(1, 2, 3)).sum(-1).max()))
        return super().updated_scores(scores, probabilities)


@pytest.mark.engine
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "mqa"])
def test_a_step_spans_heavy_and_recent_and_itself(heads: tuple[int, int]) -> None:
    """Eviction follows attention: the first step after the prompt, and every later one, sees budget + 1 tokens."""
    model = exact_llama(*heads, layers=1)
    # Nearly uniform attention, so that every token in the span gets something.
    model.model.layers[0].self_attn.q_proj.weight.mul_(1e-3)
    ids = random_ids(1, 60)
    rule = Watched(budget=16)
    cache = build_cache(model, Method("h2o", rule, DENSE), ids[:, :30], 30)
    assert rule.spans == []
    spans = []
    for at in range(30, 60):
        step(model, ids[:, at : at + 1], cache)
        # Per head: slots that hold a token during attention are those kept now and the one just given up.
        spans.append(cache.layers[0].slots.length)
        assert cache.kept_tokens == 16
    assert spans == [17] * 30
    if heads[1] == 1:
        assert rule.spans == [17] * 30


@pytest.mark.engine
def test_heads_rows_and_layers_decide_for_themselves() -> None:
    model = exact_llama(6, 3)
    cache = build_cache(model, Method("h2o", H2O(budget=20), DENSE), random_ids(3, 80))
    decisions = [tuple(row) for layer in cache.layers for batch in layer.kept_positions().tolist() for row in batch]
    assert len(decisions) == 2 * 3 * 3
    assert len(set(decisions)) == len(decisions)


def scores_by_position(cache: KVCache, layer: int) -> Tensor:
    """float32 [B, Hkv, seen]; zero where nothing is kept."""
    held = cache.layers[layer]
    used = held.position >= 0
    out = torch.zeros(*held.position.shape[:2], held.seen)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            out[b, h, held.position[b, h, used[b, h]].long()] = held.scores[b, h, used[b, h]]
    return out


@pytest.mark.engine
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_prompt_and_steps_add_up_to_one_prefill(combine: str) -> None:
    """Without an eviction, 40 prompt tokens and 40 steps, alone or in questions of ten, give the column sums of an
    80-token prompt: nothing is counted twice, and no query adds to a later token."""
    model = exact_llama(6, 2)
    ids = random_ids(2, 80)
    rule = H2O(budget=200, combine=combine)
    whole = build_cache(model, Method("h2o", rule, DENSE), ids, 40)
    record = prefill(model, ids[:, :40], [rule])
    for q in (1, 10):
        cache = build_cache(model, Method("h2o", rule, DENSE), record, 40, max_step=10)
        for at in range(40, 80, q):
            step(model, ids[:, at : at + q], cache)
        for layer in range(2):
            got, want = scores_by_position(cache, layer), scores_by_position(whole, layer)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.engine
def test_survivors_keep_their_scores() -> None:
    """After the prompt's eviction and after each step: a survivor's score never falls, and a newcomer starts at what
    it gave itself, not at what its slot's former token had."""
    model = exact_llama(4, 2)
    ids = random_ids(1, 90)
    rule = H2O(budget=12)
    record = prefill(model, ids[:, :50], [rule])
    cache = build_cache(model, Method("h2o", rule, DENSE), record, 40)
    before = [record.layers[i].observed[rule.observations()[0]] for i in range(2)]
    for layer in range(2):
        now = scores_by_position(cache, layer)
        kept = now > 0
        assert torch.equal(now[kept], before[layer][kept])
    for at in range(50, 90):
        earlier = [scores_by_position(cache, layer) for layer in range(2)]
        step(model, ids[:, at : at + 1], cache)
        for layer in range(2):
            now = scores_by_position(cache, layer)
            old = now[..., :at]
            assert (old[old > 0] >= earlier[layer][old > 0]).all()
            assert (now[..., at] <= 2).all() and (now[..., at] > 0).all()  # two query heads a KV head


@pytest.mark.engine
def test_scores_do_not_depend_on_what_follows_the_prompt() -> None:
    """Decisions at the end of the prompt are those of the prompt alone: other tokens behind it change nothing."""
    model = exact_llama(4, 2)
    ids, other = random_ids(1, 60), random_ids(1, 60, seed=1)
    other[:, :40] = ids[:, :40]
    rule = H2O(budget=16)
    alone = prefill(model, ids[:, :40], [rule])
    for longer in (ids, other):
        record = prefill(model, longer, [rule])
        again = prefill(model, longer[:, :40], [rule])
        observation = rule.observations()[0]
        for layer in range(2):
            assert torch.equal(alone.layers[layer].observed[observation], again.layers[layer].observed[observation])
            torch.testing.assert_close(record.layers[layer].key[:, :, :40], alone.layers[layer].key)


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("share", "prompt", "tokens"),
    [(0.25, 10, 3), (0.25, 100, 25), (0.1, 30, 3), (0.29, 100, 29), (0.07, 100, 7), (0.999, 10, 10), (0.5, 7, 4)],
)
def test_share_of_the_prompt_is_rounded_up_once(share: float, prompt: int, tokens: int) -> None:
    """In decimal: 0.1 of 30 is 3, though the product of the two floats is a little more."""
    assert H2O(budget=share).tokens(prompt) == tokens


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({}, "budget=256"),
        ({"budget": None}, "budget=256"),
        ({"budget": 1}, "budget=2"),
        ({"budget": 8, "recent": 8}, "budget=9"),
        ({"budget": 8, "recent": 0}, "window=1"),
        ({"budget": 8, "recent": -1}, "window=1"),
        ({"budget": 8, "recent": True}, "window=1"),
        ({"budget": 8, "recent": 2.5}, "window=1"),
        ({"budget": 8, "combine": "median"}, "sum or max"),
    ],
)
def test_knobs_that_cannot_be(knobs: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as error:
        H2O(**knobs)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_share_below_the_fixed_part() -> None:
    with pytest.raises(UserError, match="budget=0.1 of a 30-token prompt is 3 tokens, below the 9") as error:
        H2O(budget=0.1, recent=8).tokens(30)
    assert "type budget=9 or more" in str(error.value)
