"""StreamingLLM's rule: which tokens stay, and what its knobs may be."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.rule import EMPTY, NO_SCORES, keep_best, lowest
from kvbench.errors import UserError
from kvbench.methods.streaming_llm import StreamingLLM


@pytest.mark.parametrize("n_sink", [0, 1, 4])
@pytest.mark.parametrize("budget", [5, 8, 20])
def test_sinks_and_window_of_a_prompt(n_sink: int, budget: int) -> None:
    position = torch.arange(30).expand(2, 3, 30)
    rule = StreamingLLM(budget=budget, n_sink=n_sink)
    kept = keep_best(rule.priority(NO_SCORES, position, 29, budget, 0), budget)
    want = [*range(n_sink), *range(30 - (budget - n_sink), 30)]
    assert kept.tolist() == [[want] * 3] * 2


def test_sinks_survive_in_any_slot_order() -> None:
    """Sinks are known by position, not by slot: a shuffled cache with holes gives up the oldest of the window."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    position = torch.arange(12)[order].to(torch.int32)
    position[(position == 5) | (position == 8)] = EMPTY
    position = position.view(1, 1, -1)
    rule = StreamingLLM(budget=8)
    victims = lowest(rule.priority(NO_SCORES, position, 11, 8, 0), position, 3)
    assert position[0, 0, victims[0, 0]].tolist() == [4, 6, 7]


def test_variants() -> None:
    assert StreamingLLM(budget=8).sinks_in_place == 4
    assert StreamingLLM(budget=8, n_sink=2).sinks_in_place == 2
    assert StreamingLLM(budget=8, variant="absolute").sinks_in_place == 0


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({}, "budget=256"),
        ({"budget": 4}, "type budget=5 or more"),
        ({"budget": 3}, "4 sinks and the newest token"),
        ({"budget": 8, "n_sink": 8}, "type budget=9 or more"),
        ({"budget": 8, "n_sink": -1}, "sinks=4"),
        ({"budget": 8, "n_sink": True}, "sinks=4"),
        ({"budget": 8, "n_sink": 1.5}, "sinks=4"),
        ({"budget": 8, "variant": "relative"}, "in_cache or absolute"),
    ],
)
def test_knobs_that_cannot_be(knobs: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as error:
        StreamingLLM(**knobs)
    assert named in str(error.value) and "\n" not in str(error.value)
