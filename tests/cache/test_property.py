"""Random cases of rule, store, shape, batch and steps, each against a slow layer by masks.

100 or so run in the normal suite, 2,000 with KVBENCH_NIGHTLY=1. Rules and stores come from conf/: a new yaml joins.
A failure prints its case; `check(Case(...))` runs it again.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from kvbench.api import load_method
from kvbench.cache.build import Method, build_layer
from kvbench.cache.merge import merge_prompt
from kvbench.cache.plan import plan_layer
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import RotateBack, rotate_back
from kvbench.cache.store import DenseStore, SlotShape
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.kernels import REFERENCE, choose
from kvbench.kernels.prefill import Scoring
from tests.shared.families import exact_llama
from tests.shared.observing import observed_of
from tests.shared.reference import rotate
from tests.shared.slow_layer import Reading, SlowLayer, Tokens

CASES = 2_000 if os.environ.get("KVBENCH_NIGHTLY") == "1" else 100
SEED = 0

LEFT_OUT_METHODS = {
    "recompute": "holds no keys and values",
    "adakv": "its heads keep unequally many tokens: tests/methods/test_adakv.py",
    "duo": "its heads keep unequally many tokens: tests/methods/test_duo.py",
}
LEFT_OUT_STORES = {"lowrank": "needs a whole model's eigenvectors: tests/methods/test_lowrank.py"}
for stock in (name for name in BUILT_IN.names("store") if name.startswith("hf_")):
    LEFT_OUT_METHODS[stock] = LEFT_OUT_STORES[stock] = (
        "a cache of transformers' own, not of slots: tests/cache/test_stock.py"
    )
METHODS = [name for name in BUILT_IN.names("method") if name not in LEFT_OUT_METHODS]
STORES = [name for name in BUILT_IN.names("store") if name not in LEFT_OUT_STORES]

# Settings that papers give for thousands of tokens, small enough for prompts of some dozens.
SMALL = {
    "window": (1, 2, 5),
    "pool": (1, 3, 7),
    "block": (2, 3, 5),
    "n_sink": (0, 1, 4),
    "future": (8, 32),
    "recent": (None, 1, 3),
    "beta": (5, 20),
    "seed": (0, 7),
    "combine": ("sum", "max"),
    "variant": ("in_cache", "absolute"),
    "weigh": ("attention", "output"),
    "recipients": (1, 3, 32),
    "merge_by": ("sum", "mean"),
    "ema": (0.1, 0.5),
    "chunk": (1, 4, 9),
    "buffer": (1, 2, 7),
    "mix_lambda": (0.1, 0.5, 1.0),
    "threshold": (0.1, 0.5),
    "group_size": (8, 16),
    "protect_first": (None, None, 3),
    "protect_last": (None, None, 4),
}


@dataclass(frozen=True)
class Case:
    """One layer of `layers` with a prompt, then forwards of `steps` tokens. rule, store: settings that differ."""

    method: str
    store: str
    rule: tuple[tuple[str, Any], ...]
    slots: tuple[tuple[str, Any], ...]
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    prompt: int
    steps: tuple[int, ...]
    layer: int
    layers: int
    kernel: str
    softcap: float | None
    learned_sinks: bool
    seed: int


@cache
def loaded(name: str) -> Method:
    """A config's method with its own defaults, to be made small by a case."""
    return load_method(name, budget=600)


def method_of(case: Case) -> Method:
    made = loaded(case.method)
    store = loaded(f"full+{case.store}").store if case.store != case.method else made.store
    return Method(case.method, replace(made.rule, **dict(case.rule)), replace(store, **dict(case.slots)))


@cache
def rotation(head_dim: int) -> tuple[RotateBack, float]:
    """A Llama's rotary embedding in float64, and its base."""
    model = exact_llama(1, 1, head_dim, layers=1)
    return rotate_back(model, 0), float(model.config.rope_parameters["rope_theta"])


def draw_case(method: str, number: int) -> Case:
    """Drawn from the seed, the method and a number; what the parts refuse together is drawn again."""
    draw = random.Random(f"{SEED}/{method}/{number}")
    for _ in range(1_000):
        case = _draw(draw, method)
        try:
            made = method_of(case)
            made.check_combination()
            made.store.check(case.head_dim, case.head_dim)
            made.rule.tokens(case.prompt)
        except UserError:
            continue
        return case
    raise AssertionError(f"no case of {method} fits; if that is meant, LEFT_OUT_METHODS is the place to say why")


def _draw(draw: random.Random, method: str) -> Case:
    rule, own = loaded(method).rule, method in STORES
    # Merged rows often lie halfway between two numbers of a narrow store: tests/methods/test_cam.py has codes.
    store = method if own else "dense" if rule.merges else draw.choice(STORES)
    settings = {name: draw.choice(SMALL[name]) for name in _fields(rule) & set(SMALL)}
    if len(rule.decodes) > 1 and rule.needs_budget:
        settings["decode"] = draw.choice(rule.decodes)
    if rule.needs_budget:
        settings["budget"] = 600
        least = replace(rule, **settings).smallest_budget
        settings["budget"] = draw.choice((least, least + draw.randrange(30), draw.choice((0.25, 0.5, 0.9))))
    slots_class = loaded(method).store if own else loaded(f"full+{store}").store
    slots = {name: draw.choice(SMALL[name]) for name in _fields(slots_class) & set(SMALL)}
    if "residual_length" in _fields(slots_class):
        slots["residual_length"] = slots["group_size"] * draw.choice((1, 2, 3))
    capped = draw.random() < 0.2 and not any(o.before_rotation for o in rule.observations())
    layers = draw.choice((1, 2, 5))
    return Case(
        method,
        store,
        tuple(sorted(settings.items())),
        tuple(sorted(slots.items())),
        batch=draw.choice((1, 2, 3)),
        kv_heads=draw.choice((1, 2, 3)),
        group=draw.choice((1, 2, 3)),
        head_dim=draw.choice((16, 32, 48)),
        prompt=draw.choice((1, 2, 7, 20, 33, 50, 70)),
        steps=tuple(draw.choice((1, 1, 1, 1, 2, 5)) for _ in range(draw.choice((3, 10, 25)))),
        layer=draw.randrange(layers),
        layers=layers,
        kernel=draw.choice(("reference", "cpu")),
        softcap=4.0 if capped else None,
        learned_sinks=draw.random() < 0.2,
        seed=draw.randrange(10_000),
    )


def _fields(thing: Any) -> set[str]:
    return {field.name for field in fields(thing)}


def draw_tokens(case: Case, theta: float) -> Tokens:
    generator = torch.Generator().manual_seed(case.seed)
    count, dtype = case.prompt + sum(case.steps), torch.float64 if case.kernel == "reference" else torch.float32

    def rows(heads: int) -> torch.Tensor:
        drawn = torch.randn(case.batch, heads, count, case.head_dim, generator=generator, dtype=torch.float64)
        return drawn * torch.linspace(0.5, 2, case.head_dim, dtype=torch.float64)  # channels of unequal size

    raw_query, raw_key, value = rows(case.kv_heads * case.group), rows(case.kv_heads), rows(case.kv_heads)
    query, key = (rotate(raw, torch.arange(count), theta).to(dtype) for raw in (raw_query, raw_key))
    return Tokens(raw_query, query, key, value.to(dtype))


@torch.inference_mode()
def check(case: Case) -> None:
    """The engine's layer and the slow one see the same tokens and agree on every output and every decision."""
    method, (turn, theta) = method_of(case), rotation(case.head_dim)
    tokens = draw_tokens(case, theta)
    exact, n = case.kernel == "reference", case.prompt
    logits = torch.linspace(-1, 1, case.kv_heads * case.group, dtype=torch.float64) if case.learned_sinks else None
    scoring = Scoring(case.head_dim**-0.5, case.softcap, None, logits if exact or logits is None else logits.float())
    query, key, value = (x[:, :, :n] for x in (tokens.query, tokens.key, tokens.value))
    observed = observed_of(method.rule, query, key, scoring, turn)
    record = LayerRecord(case.layer, key, value, scoring, observed, turn)
    method = replace(method, rule=method.rule.of_layer(record))
    kernel = REFERENCE if exact else choose(torch.device("cpu"), torch.float32, "cpu")
    step, new = max(case.steps), sum(case.steps)
    plan = plan_layer(method, record, case.layers)
    layer = build_layer(record, replace(plan, max_new_tokens=new, step=step, kernel=kernel, rotate_back=turn))
    # The slow one.
    rule, budget = method.rule, method.rule.layer_tokens(n, case.layer, case.layers)
    scores = rule.initial_scores(record)
    kept = torch.tensor(
        [[picked(method, scores, b, h, budget, case) for h in range(case.kv_heads)] for b in range(case.batch)]
    )
    assert [[row.tolist() for row in rows] for rows in layer.kept_positions()] == kept.tolist(), "prompt"
    rows = kept[..., None].expand(-1, -1, -1, case.head_dim)
    shape = SlotShape(
        case.batch, case.kv_heads, case.head_dim, case.head_dim, kept.shape[2] + new, step, key.dtype, key.device
    )
    carried = None
    if rule.merges:  # tests/methods hold what it does to a prompt against loops
        key, value, carried = merge_prompt(rule, key, value, kept, scores, case.layer)
    reading = Reading(method.store, shape, key.gather(2, rows), value.gather(2, rows))
    decides = scores is not None and rule.holds_budget
    slow = SlowLayer(
        rule,
        reading,
        kept,
        scores.gather(-1, kept).double() if scores is not None and decides else None,
        budget if rule.holds_budget else None,
        case.layer,
        scoring,
        theta,
        n,
        1e-6 if exact else 1e-4,
        turn,
        carried,
    )
    at = n
    for q in case.steps:
        layer.update(tokens.key[:, :, at : at + q], tokens.value[:, :, at : at + q])
        output = layer.attend(tokens.query[:, :, at : at + q], scoring)
        expected, fault = slow.step(tokens, q, [[row.tolist() for row in rows] for rows in layer.kept_positions()])
        tolerance = 1e-8 if exact else 5e-4
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance, msg=f"output at {at}")
        assert fault is None, f"token {at}: {fault}"
        at += q
        assert layer.get_seq_length() == at


def picked(method: Method, scores: torch.Tensor | None, b: int, h: int, budget: int | None, case: Case) -> list[int]:
    """The prompt's positions that stay: the best by priority, of equals the newer."""
    everything = list(range(case.prompt))
    if budget is None or budget >= case.prompt:
        return everything
    position = torch.arange(case.prompt).expand(case.batch, case.kv_heads, -1)
    worth = method.rule.priority(
        torch.empty(0) if scores is None else scores, position, case.prompt - 1, budget, case.layer
    )[b, h].tolist()
    return sorted(sorted(everything, key=lambda p: (worth[p], p))[case.prompt - budget :])


@pytest.mark.parametrize("method", METHODS)
def test_random_cases_agree_with_a_slow_layer(method: str) -> None:
    for number in range(-(-CASES // len(METHODS))):
        case = draw_case(method, number)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{error}\nto see it again: check({case!r})") from error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_half_precision_keeps_what_float32_keeps_of_the_same_numbers(method: str, dtype: torch.dtype) -> None:
    """Scores are decided in float32. Codes aside: rotated keys round to the model's dtype before they become codes."""
    for number in range(3):
        drawn = draw_case(method, number)  # but with many tokens, so that scores are close
        case = replace(
            drawn,
            store=method if method in STORES else "dense",
            slots=(),
            batch=2,
            kv_heads=3,
            prompt=200,
            steps=(1,) * 10,
        )
        rule, store = method_of(case).rule, DenseStore()
        if rule.needs_budget:
            rule = replace(rule, budget=rule.smallest_budget + 40)
        turn, theta = rotation(case.head_dim)
        tokens, kept = draw_tokens(replace(case, kernel="cpu"), theta), []
        for held in (dtype, torch.float32):
            query, key, value = (x.to(dtype).to(held) for x in (tokens.query, tokens.key, tokens.value))
            scoring = Scoring(case.head_dim**-0.5, case.softcap, None, None)
            prompt = [x[:, :, : case.prompt] for x in (query, key, value)]
            observed = observed_of(rule, prompt[0], prompt[1], scoring, turn)
            record = LayerRecord(case.layer, prompt[1], prompt[2], scoring, observed, turn)
            plan = plan_layer(Method(method, rule, store), record, case.layers)
            room = {"max_new_tokens": sum(case.steps), "step": max(case.steps)}
            layer = build_layer(record, replace(plan, rotate_back=turn, **room))
            kept.append([layer.kept_positions().tolist()])
            at = case.prompt
            for q in case.steps:
                layer.update(key[:, :, at : at + q], value[:, :, at : at + q])
                layer.attend(query[:, :, at : at + q], scoring)
                at += q
                kept[-1].append(layer.kept_positions().tolist())
        assert kept[0] == kept[1], case


def test_cases_reach_every_store_and_every_kind_of_step() -> None:
    drawn = [draw_case(method, number) for method in METHODS for number in range(40)]
    assert {case.store for case in drawn} == set(STORES), "if that is meant, LEFT_OUT_STORES is the place to say why"
    assert {case.kernel for case in drawn} == {"reference", "cpu"}
    assert {dict(case.rule).get("decode") for case in drawn} == {None, "append", "evict"}
    assert draw_case("h2o", 3) == draw_case("h2o", 3)


def test_what_is_left_out_exists_and_says_why() -> None:
    assert set(LEFT_OUT_METHODS) <= set(BUILT_IN.names("method")) and set(LEFT_OUT_STORES) <= set(
        BUILT_IN.names("store")
    )
    assert all(LEFT_OUT_METHODS.values()) and all(LEFT_OUT_STORES.values())
