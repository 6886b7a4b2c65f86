"""Random eviction: sinks, half recent, the rest a uniform draw that does not change its mind."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.rule import NO_SCORES, keep_best
from kvbench.errors import UserError
from kvbench.methods.random import Random


def kept_of(
    prompt: int, budget: int, seed: int = 0, heads: int = 1, layer: int = 0, batch: int = 1, n_sink: int = 0
) -> torch.Tensor:
    position = torch.arange(prompt).expand(batch, heads, prompt)
    priority = Random(budget=budget, n_sink=n_sink, seed=seed).priority(NO_SCORES, position, prompt - 1, budget, layer)
    return keep_best(priority, budget)


def test_the_recent_half_always_stays() -> None:
    for budget in (2, 7, 40):
        kept = kept_of(100, budget, heads=3)
        assert (kept[..., -(budget // 2) :] == torch.arange(100 - budget // 2, 100)).all()


def test_sinks_and_recent_tokens_are_protected_unless_asked_otherwise() -> None:
    kept = kept_of(100, 24, heads=3, n_sink=4)
    assert (kept[..., :4] == torch.arange(4)).all()
    assert (kept[..., -10:] == torch.arange(90, 100)).all()  # half of the 20 after the sinks
    position = torch.arange(100).expand(1, 3, 100)
    free = keep_best(Random(budget=24, n_sink=0, recent=1).priority(NO_SCORES, position, 99, 24, 0), 24)
    assert (free[..., -1] == 99).all()
    assert (free[..., 0] > 0).any() and (free[..., -2] < 98).any()


def test_the_rest_is_a_uniform_draw() -> None:
    """2,000 seeds: each of 80 older positions is drawn 20 times in 80, within five standard errors."""
    count = torch.zeros(100)
    for seed in range(2000):
        count[kept_of(100, 40, seed)[0, 0]] += 1
    assert (count[80:] == 2000).all()
    expected, deviation = 2000 * 0.25, (2000 * 0.25 * 0.75) ** 0.5
    assert ((count[:80] - expected).abs() < 5 * deviation).all()
    assert count[:40].sum() == pytest.approx(2000 * 10, abs=5 * (2000 * 5) ** 0.5)  # no half is favoured


def test_seed_layer_and_head_draw_apart_and_rows_alike() -> None:
    draws = {
        tuple(head.tolist())
        for seed in (0, 1)
        for layer in (0, 1)
        for head in kept_of(200, 50, seed, heads=3, layer=layer)[0]
    }
    assert len(draws) == 12
    rows = kept_of(200, 50, heads=2, batch=3)
    assert (rows == rows[:1]).all()


def test_the_priority_of_a_token_never_changes() -> None:
    """Dropped at the end of the prompt or step by step: what is left of the older half is the same."""
    position = torch.arange(90).view(1, 1, -1)
    rule = Random(budget=30)
    early = rule.priority(NO_SCORES, position, 89, 30, 0)
    late = rule.priority(NO_SCORES, position[..., 20:50], 120, 30, 0)
    assert torch.equal(early[..., 20:50], late)


def test_knobs_that_cannot_be() -> None:
    with pytest.raises(UserError, match="type budget=6 or more"):
        Random(budget=1)
    with pytest.raises(UserError, match="needs a budget: type budget=256"):
        Random()
