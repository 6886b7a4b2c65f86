"""R-KV: importance minus redundancy, a block of new tokens at a time, against loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.cache.bytes import held_bytes
from kvbench.cache.held import held_prompt
from kvbench.cache.layer import SlotLayer
from kvbench.cache.record import LayerRecord
from kvbench.errors import UserError
from kvbench.kernels import prefill as kernels
from kvbench.kernels.prefill import Scoring
from kvbench.methods.per_token import PerToken
from kvbench.methods.r_kv import RKV, redundancy
from tests.shared.observing import observed_of
from tests.shared.picks import HKV, SCALING, B, best, draw, feed, group, layer_of


def importance(query: Tensor, key: Tensor, b: int, kv: int, held: list[int], rule: RKV) -> list[float]:
    """Of the tokens held before the window, oldest first: query heads by their maximum, softmax, mean, max-pooling."""
    before = held[: -rule.window]
    mean = [0.0] * len(before)
    for row in range(held[-1] - rule.window + 1, held[-1] + 1):
        scores = [
            max(SCALING * float(query[b, head, row].double() @ key[b, kv, j].double()) for head in group(kv))
            for j in before
        ]
        top = max(scores)
        total = sum(math.exp(score - top) for score in scores)
        mean = [m + math.exp(s - top) / total / rule.window for m, s in zip(mean, scores, strict=True)]
    reach = rule.pool // 2
    return [max(mean[max(0, i - reach) : i + reach + 1]) for i in range(len(mean))]


def repeats(key: Tensor, b: int, kv: int, held: list[int], threshold: float) -> list[float]:
    """Redundancy of the tokens held, oldest first: mean cosines, without the newest similar one, through a softmax."""
    n = len(held)
    rows = [key[b, kv, j].double() / key[b, kv, j].double().norm() for j in held]
    cosine = [[0.0 if i == j else float(rows[i] @ rows[j]) for j in range(n)] for i in range(n)]
    for i in range(n):
        similar = [j for j in range(n) if cosine[i][j] > threshold]
        if similar:
            cosine[i][similar[-1]] = 0.0
    mean = [sum(cosine[i][j] for i in range(n)) / n for j in range(n)]
    total = sum(math.exp(m) for m in mean)
    return [math.exp(m) / total for m in mean]


def slow_evict(query: Tensor, key: Tensor, b: int, kv: int, held: list[int], rule: RKV, budget: int) -> list[int]:
    """The tokens that stay of those held."""
    redundant = repeats(key, b, kv, held, rule.threshold)
    score = {}
    for i, attended in enumerate(importance(query, key, b, kv, held, rule)):
        score[held[i]] = rule.mix_lambda * attended - (1 - rule.mix_lambda) * redundant[i]
    return sorted([*best(score, budget - rule.window), *held[-rule.window :]])


def alike(tokens: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of which some have similar keys."""
    query, key, value = draw(tokens, seed)
    return query, key + 3 * key[:, :, torch.arange(tokens) % 7], value


RULES = [
    RKV(budget=20, buffer=6),
    RKV(budget=20, buffer=1, mix_lambda=0.5, pool=1),
    RKV(budget=15, buffer=9, window=3, threshold=0.2, mix_lambda=0.9),
    RKV(budget=20, buffer=6, mix_lambda=1.0),
]


@pytest.mark.parametrize("rule", RULES)
def test_prompt_and_decode_follow_the_loops(rule: RKV) -> None:
    budget, prompt, stop = int(rule.budget or 0), 40, 62
    query, key, value = alike(stop)
    layer = layer_of(rule, query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt])
    held = [[slow_evict(query, key, b, h, list(range(prompt)), rule, budget) for h in range(HKV)] for b in range(B)]
    assert layer.kept_positions().tolist() == held
    for t in range(prompt, stop):
        feed(layer, query, key, value, t, t + 1)
        for b in range(B):
            for h in range(HKV):
                held[b][h] = [*held[b][h], t]
                if len(held[b][h]) == budget + rule.buffer:
                    held[b][h] = slow_evict(query, key, b, h, held[b][h], rule, budget)
        assert layer.kept_positions().tolist() == held


def scored(rule: RKV, tokens: int) -> tuple[Tensor, Tensor]:
    """The rule's scores of a prompt, and the importance alone."""
    query, key, value = alike(tokens)
    scoring = Scoring(SCALING)
    record = LayerRecord(0, key, value, scoring, observed_of(rule, query, key, scoring))
    held = held_prompt(record, rule.observations())
    return rule.initial_scores(record), rule._importance(held.recent_query, held.key[:, :, : -rule.window], scoring)


def test_a_lambda_of_1_is_the_attention_rule_to_the_bit() -> None:
    scores, important = scored(RKV(budget=20, mix_lambda=1.0), 40)
    assert torch.equal(scores[..., :-8], important)
    query, key, _ = alike(40)
    rule = RKV(budget=20)
    for b in range(B):
        for h in range(HKV):
            expected = torch.tensor(importance(query, key, b, h, list(range(40)), rule))
            torch.testing.assert_close(important[b, h], expected, atol=1e-6, rtol=1e-5)


def test_a_lambda_of_0_is_redundancy_alone() -> None:
    scores, _ = scored(RKV(budget=20, mix_lambda=0.0), 40)
    _, key, _ = alike(40)
    assert torch.equal(scores[..., :-8], -redundancy(key, 0.5)[..., :-8])


def planted(copies: int = 5, phrase: int = 6, distinct: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """12 tokens that all differ, then 5 copies of one phrase with a little noise, then 8 newest tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    said = rows[distinct : distinct + phrase].repeat(copies, 1)
    newest = rows[distinct + phrase : distinct + phrase + 8]
    text = torch.cat([rows[:distinct], said, newest])
    key = (text + 0.01 * torch.randn(text.shape, generator=generator)).expand(1, 1, -1, -1)
    # Queries that look for the phrase a little more than for the rest: attention alone keeps its copies.
    query = (0.5 * said[:phrase].sum(0)).expand(1, 2, len(text), 32)
    return query, key, torch.randn(key.shape, generator=generator)


def kept_of_planted(mix_lambda: float) -> list[int]:
    rule = RKV(budget=12 + 6 + 8, mix_lambda=mix_lambda, pool=1)
    query, key, value = planted()
    return layer_of(rule, query, key, value).kept_positions()[0, 0].tolist()


def test_of_planted_repetition_the_distinct_part_and_the_newest_copy_stay() -> None:
    distinct, newest_copy, newest = range(12), range(36, 42), range(42, 50)
    assert kept_of_planted(0.1) == [*distinct, *newest_copy, *newest]
    assert set(kept_of_planted(1.0)) & set(distinct) == set(), "attention alone keeps the copies"


def test_redundancy_by_blocks_of_rows_is_the_whole_matrix_s(monkeypatch: pytest.MonkeyPatch) -> None:
    _, key, _ = alike(75)
    whole = redundancy(key, 0.5)
    monkeypatch.setattr(kernels, "BLOCK_BYTES", 1)  # blocks of 16 rows
    torch.testing.assert_close(redundancy(key, 0.5), whole, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("store", [None, PerToken(4, 4), PerToken(8, 8, rotate=True)])
def test_no_more_than_budget_and_buffer_is_ever_held(store: PerToken | None) -> None:
    query, key, value = (x.repeat(1, 1, 1, 2) for x in alike(90))  # heads of 32 channels
    rule = RKV(budget=20, buffer=7, protect_first=3)
    layer = layer_of(rule, query[:, :, :30], key[:, :, :30], value[:, :, :30], store)
    assert layer.capacity == 27
    sizes, before = set(), held_bytes(layer.buffers()).held
    for t in range(30, 90):
        layer.update(key[:, :, t : t + 1], value[:, :, t : t + 1])
        assert layer.kept <= 27
        layer.attend(query[:, :, t : t + 1], Scoring(SCALING))
        sizes.add(layer.kept)
        stay = layer.kept_positions()
        assert (stay[..., :3] == torch.arange(3)).all() and (stay[..., -8:] == torch.arange(t - 7, t + 1)).all()
    assert sizes == set(range(20, 27)) and held_bytes(layer.buffers()).held == before
    assert held_bytes(layer.buffers()).parts["queries"] == B * 4 * 8 * 32 * 4


@pytest.mark.parametrize("prompt", [1, 5, 9, 20])
def test_short_prompts_fill_budget_and_buffer_first(prompt: int) -> None:
    query, key, value = alike(40)
    layer = layer_of(RKV(budget=12, buffer=4), *(x[:, :, :prompt] for x in (query, key, value)))
    assert isinstance(layer, SlotLayer) and layer.kept == min(prompt, 12)
    feed(layer, query, key, value, prompt, 40)
    assert 12 <= layer.kept < 16 and layer.seen == 40


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RKV(budget=8), "budget=9"),
        (lambda: RKV(budget=20, buffer=0), "buffer=0.*1 or more"),
        (lambda: RKV(budget=20, mix_lambda=1.5), "mix_lambda=1.5.*from 0 to 1, for example mix_lambda=0.1"),
        (lambda: RKV(budget=20, threshold=-0.1), "threshold=-0.1"),
        (lambda: RKV(budget=20, pool=4), "odd number"),
    ],
)
def test_unusable_settings(make, words) -> None:
    with pytest.raises(UserError, match=words):
        make()
