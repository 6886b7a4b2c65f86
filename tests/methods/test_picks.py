"""Rules that pick tokens by scores: ties, appending, and settings that are refused."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.cache.build import Method
from kvbench.cache.rule import keep_best, lowest
from kvbench.errors import UserError
from kvbench.methods.critical import Critical
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.lagkv import LagKV
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.random import Random
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from tests.shared.picks import best, draw, feed, layer_of

COARSE = [0.5, 0.25, 0.5, 0.75, 0.25, 0.25, 0.5, 0.75, 0.25, 0.5, 0.75, 0.25, 0.5, 0.25, 0.5, 0.5]
"""Scores as bfloat16 gives them: few distinct values."""
SCORED = {
    "h2o": (H2O(budget=8), lambda p: p >= 12),
    "tova": (Tova(budget=8), lambda p: p == 15),
    "snapkv": (SnapKV(budget=8, window=3), lambda p: p >= 13),
    "pyramid": (Pyramid(budget=8, window=3), lambda p: p >= 13),
    "knorm": (KNorm(budget=8), lambda p: p == 15),
    "keydiff": (KeyDiff(budget=8), lambda p: p == 15),
    "lagkv": (LagKV(budget=8, n_sink=1, block=3), lambda p: False),
}


@pytest.mark.parametrize("name", SCORED)
def test_of_equal_scores_the_older_token_is_evicted_from_any_slot(name):
    rule, always = SCORED[name]
    expected = best({p: math.inf if always(p) else score for p, score in enumerate(COARSE)}, 8)
    scores, position = torch.tensor(COARSE).view(1, 1, -1), torch.arange(16).view(1, 1, -1)
    assert keep_best(rule.priority(scores, position, 15, 8, 0), 8).flatten().tolist() == expected
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    scores, position = scores[..., slots], position[..., slots]
    victims = position[0, 0, lowest(rule.priority(scores, position, 15, 8, 0), position, 8).flatten()]
    assert sorted(victims.tolist()) == sorted(set(range(16)) - set(expected))


@pytest.mark.parametrize("rule", [H2O, StreamingLLM, Random, Tova, KNorm])
def test_rules_that_hold_the_budget_cut_only_the_prompt_when_told_to_append(rule):
    query, key, value = draw(60)
    cut = layer_of(rule(budget=20), query[:, :, :40], key[:, :, :40], value[:, :, :40])
    store = Kivi(group_size=16, residual_length=16)  # append-only, and enough now
    method = Method("m", rule(budget=20, decode="append"), store)
    method.check_combination()
    layer = layer_of(method.rule, query[:, :, :40], key[:, :, :40], value[:, :, :40], store)
    assert layer.scores is None  # nothing will be decided any more
    feed(layer, query, key, value, 40, 60)
    assert layer.kept_positions().tolist() == [
        [[*kept, *range(40, 60)] for kept in row] for row in cut.kept_positions().tolist()
    ]


def test_of_equal_keys_the_older_token_is_evicted():
    query, key, value = draw(30)
    key[:] = key[:, :, :1]
    for rule in (KNorm(budget=10), KeyDiff(budget=10)):
        assert layer_of(rule, query, key, value).kept_positions()[0, 0].tolist() == list(range(20, 30))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SnapKV(budget=32), "budget=33"),
        (lambda: SnapKV(budget=64, window=0), "window=32"),
        (lambda: SnapKV(budget=64, pool=4), "odd"),
        (lambda: SnapKV(budget=64, decode="keep"), "decode=append"),
        (lambda: KNorm(budget=64, decode="x"), "decode=evict"),
        (lambda: Critical(budget=64, decode="evict"), "type decode=append"),
        (lambda: LagKV(budget=100), "budget=260"),
        (lambda: LagKV(budget=500, block=1), "128"),
        (lambda: Tova(), "budget=256"),
        (lambda: Method("snapkv", SnapKV(budget=64, decode="evict"), Kivi()).check_combination(), "store=dense"),
    ],
)
def test_settings_that_are_not_allowed_are_refused_with_what_to_type(make, words):
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
