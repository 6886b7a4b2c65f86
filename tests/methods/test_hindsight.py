"""Hindsight and the gap closed, against exhaustive search over all subsets on a tiny model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.decode import step
from kvbench.cache.future import Future
from kvbench.cache.store import DenseStore
from kvbench.checks import check_methods
from kvbench.errors import UserError
from kvbench.measures.fidelity import Fidelity
from kvbench.measures.memory import Memory
from kvbench.measures.perplexity import check_stream
from kvbench.measures.perplexity.windows import score_windows
from kvbench.methods.h2o import H2O
from kvbench.methods.hindsight import Hindsight
from kvbench.methods.random import Random
from kvbench.results.gap_closed import gap_closed
from tests.shared.models import random_llama
from tests.shared.scoring import MODEL, TEXT, bench, settings
from tests.shared.text import loaded, methods, rows_of, value

PROMPT, NEW, BUDGET = 10, 4, 4
KV_HEADS, GROUP = 2, 2


def future_mass(ids: Tensor, prompt: int = PROMPT, weighted: bool = False) -> np.ndarray:
    """Attention that tokens receive from the tokens behind the prompt: [layers, Hkv, T], by transformers' own eager
    attention; weighted by ||W_o v|| of each query head."""
    eager = random_llama(4, 2, 16, dtype=torch.float32)
    eager.set_attn_implementation("eager")
    values: list[Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda *given: values.append(given[2]))
        for layer in eager.model.layers
    ]
    found = eager(input_ids=ids[None], output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    out = []
    for layer, attention in enumerate(found):
        mass = attention[0, :, prompt:].sum(1)  # [Hq, T]
        if weighted:
            weight = eager.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (4, 16))
            value = values[layer][0].unflatten(1, (KV_HEADS, 16))  # [T, Hkv, D]
            norms = [(value[:, head // GROUP] @ weight[:, head].T).norm(dim=-1) for head in range(4)]
            mass = mass * torch.stack(norms)
        out.append(mass.unflatten(0, (KV_HEADS, GROUP)).sum(1))
    return torch.stack(out).double().numpy()


def best_subset(mass: np.ndarray, budget: int) -> list[int]:
    """Of all subsets with the newest token the one of the largest mass."""
    newest = len(mass) - 1
    return max(
        (sorted((*some, newest)) for some in itertools.combinations(range(newest), budget - 1)),
        key=lambda kept: math.fsum(mass[kept]),
    )


@pytest.mark.parametrize("variant", ["attention", "output"])
@pytest.mark.parametrize("start", [0, 300, 700])
def test_hindsight_keeps_the_best_subset_of_all(variant: str, start: int) -> None:
    ids = TEXT[start : start + PROMPT + NEW]
    rule = Hindsight(BUDGET, weigh=variant)
    record = prefill(MODEL, ids[None, :PROMPT], [rule], future=Future(ids[None, PROMPT:], PROMPT))
    cache = build_cache(MODEL, Method("hindsight", rule, DenseStore()), record)
    mass = future_mass(ids, weighted=variant == "output")
    for layer, kept in cache.kept_positions().items():
        for head in range(KV_HEADS):
            assert kept[0, head].tolist() == best_subset(mass[layer, head, :PROMPT], BUDGET)


def test_decoded_tokens_are_ranked_the_same_way() -> None:
    ids = TEXT[100 : 100 + PROMPT + NEW]
    rule = Hindsight(BUDGET)
    record = prefill(MODEL, ids[None, :PROMPT], [rule], future=Future(ids[None, PROMPT:], PROMPT))
    cache = build_cache(MODEL, Method("hindsight", rule, DenseStore()), record, max_new_tokens=NEW)
    mass = future_mass(ids)
    held = cache.kept_positions()
    kept = {(layer, head): held[layer][0, head].tolist() for layer in held for head in range(KV_HEADS)}
    for t in range(PROMPT, PROMPT + NEW):
        step(MODEL, ids[None, t : t + 1], cache)
        for (layer, head), tokens in kept.items():
            lowest = min(tokens, key=lambda token: mass[layer, head, token])
            tokens.remove(lowest)
            tokens.append(t)
            assert cache.kept_positions()[layer][0, head].tolist() == sorted(tokens)


def test_gap_closed_in_attention_mass_equals_exhaustive_search() -> None:
    """Loss: attention mass that is lost. Floor: the mean over all subsets. Ceiling: the best of them, hindsight's."""
    floor, rule, ceiling = [], [], []
    for start in range(0, 480, 40):
        ids = TEXT[start : start + PROMPT + NEW]
        mass = future_mass(ids)[0, 0, :PROMPT]
        every = [[*some, PROMPT - 1] for some in itertools.combinations(range(PROMPT - 1), BUDGET - 1)]
        lost = [mass.sum() - mass[kept].sum() for kept in every]
        floor.append(np.mean(lost))
        ceiling.append(min(lost))
        for losses, one in ((rule, H2O(BUDGET, recent=1)), ([], Hindsight(BUDGET))):
            record = prefill(MODEL, ids[None, :PROMPT], [one], future=Future(ids[None, PROMPT:], PROMPT))
            held = build_cache(MODEL, Method("m", one, DenseStore()), record).kept_positions()[0][0, 0].tolist()
            losses.append(mass.sum() - mass[held].sum())
            if isinstance(one, Hindsight):
                assert losses[-1] == pytest.approx(ceiling[-1], abs=1e-6)
    found = gap_closed(floor, rule, ceiling)
    by_hand = (sum(floor) - sum(rule)) / (sum(floor) - sum(ceiling))
    assert found.value == pytest.approx(by_hand, abs=1e-12)
    assert found.value is not None and found.low is not None and found.low < found.value < 1
    assert gap_closed(floor, ceiling, ceiling).value == 1
    assert gap_closed(floor, floor, ceiling).value == 0


def bounded(decode: str = "evict", budget: int = 12) -> dict[str, Method]:
    rules = {"h2o": H2O(budget), "random": Random(budget, decode=decode), "hindsight": Hindsight(budget, decode=decode)}
    return methods("full") | {name: Method(name, rule, DenseStore()) for name, rule in rules.items()}


def test_rows_of_the_gap_closed_are_the_formula_over_the_windows() -> None:
    (finding,) = score_windows(bench(bounded()), settings(windows=12))
    for metric in ("nll", "kl"):
        losses = {
            name: np.array([float(sample["methods"][i][metric]) for sample in finding.samples])
            for i, name in enumerate(("full", "h2o", "random", "hindsight"))
        }
        expected = gap_closed(losses["random"], losses["h2o"], losses["hindsight"])
        assert (expected.value is None) == (not [r for r in finding.rows if r.metric == f"gap_closed_{metric}"])
        if expected.value is not None:
            assert value(finding.rows, "h2o", f"gap_closed_{metric}") == pytest.approx(expected.value, rel=1e-9)
    named = [row.method for row in finding.rows if row.metric == "gap_closed_kl"]
    assert named == ["h2o"], "neither the full cache nor the bounds have a gap of their own"


@pytest.mark.parametrize("other", [bounded("append"), bounded(budget=16) | methods("h2o"), methods("full", "h2o")])
def test_no_gap_without_bounds_of_the_same_tokens(other: dict[str, Method]) -> None:
    rows = rows_of(score_windows(bench(other), settings(windows=12)))
    assert not [row for row in rows if row.metric.startswith("gap_closed")]


@pytest.mark.parametrize("batches", [0, 1])
def test_a_floor_that_fails_leaves_the_rule_without_a_gap(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first batch of windows, or in the second: the rule's other rows are as they would be."""
    whole = rows_of(score_windows(bench(bounded()), settings(windows=12, batch=6)))
    built = 0

    def fails(rule: Random, *arguments: object) -> Tensor:
        nonlocal built
        built += 1
        if built > 2 * batches * (1 + 9):  # two layers: the prompt's choice, and one eviction a scored token
            raise RuntimeError("the floor fails")
        return priority(rule, *arguments)

    priority = Random.priority
    monkeypatch.setattr(Random, "priority", fails)
    here = bench(bounded())
    rows = rows_of(score_windows(here, settings(windows=12, batch=6)))
    assert [label for label, _ in here.journal.failures] == ["random"]
    assert not [row for row in rows if row.metric.startswith("gap_closed")]
    assert value(rows, "h2o", "kl") == value(whole, "h2o", "kl")


def test_what_the_ceiling_predicts_is_nearer_than_the_floor() -> None:
    rows = rows_of(score_windows(bench(bounded()), settings(windows=12)))
    assert value(rows, "hindsight", "kl") < value(rows, "random", "kl")


def test_measures_that_do_not_know_the_future_refuse_it() -> None:
    method = Method("hindsight", Hindsight(12), DenseStore())
    shape = loaded(MODEL)
    with pytest.raises(UserError, match="hindsight sees the future, and fidelity does not know the tokens to come"):
        check_methods([method], [Fidelity()], shape)
    check_methods([method], [Memory()], shape)
    with pytest.raises(UserError, match="a stream has none"):
        check_stream(method)


def test_without_a_future_the_newest_tokens_stay() -> None:
    rule = Hindsight(BUDGET)
    record = prefill(MODEL, TEXT[None, :PROMPT], [rule])
    cache = build_cache(MODEL, Method("hindsight", rule, DenseStore()), record)
    assert cache.kept_positions()[0][0, 0].tolist() == list(range(PROMPT - BUDGET, PROMPT))
