"""Errors of the cache: against dense attention written out, identities, and what each store or rule must show."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.caches import KVCache
from kvbench.cache.contents import Contents, contents
from kvbench.cache.decode import step
from kvbench.cache.observe import QueriesAt
from kvbench.cache.rule import EMPTY
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.kernels.parts import Dense
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.reference import attend
from kvbench.measures.error import Error
from kvbench.measures.error.layer_errors import METRICS, layer_errors
from kvbench.measures.error.windows import measure_errors
from kvbench.measures.target import Target
from kvbench.methods.adakv import AdaKV
from kvbench.methods.fp8 import Fp8
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.turbo import Turbo
from kvbench.models.checkpoint import ModelSpec
from kvbench.models.shape import shape_of
from kvbench.results.row import Row
from kvbench.texts.load import Text
from tests.shared.models import random_llama
from tests.shared.text import rows_of, run_context_of, value

pytestmark = pytest.mark.engine

CONTEXT, TOKENS, BUDGET = 40, 8, 16
MODEL = random_llama(4, 2, 16, dtype=torch.float32)
TEXT = torch.randint(97, (600,), generator=torch.Generator().manual_seed(1))
SETTINGS = Error(context=CONTEXT, tokens=TOKENS, windows=3, batch=2, points=3)
SCORING = Scoring(0.25)

METHODS = {
    "full": Method("full", Full(), DenseStore()),
    "h2o": Method("h2o", H2O(BUDGET), DenseStore()),
    "streaming_llm": Method("streaming_llm", StreamingLLM(BUDGET), DenseStore()),
    "adakv": Method("adakv", AdaKV(BUDGET, inner=SnapKV(BUDGET, window=4)), DenseStore()),
    "int8": Method("int8", Full(), PerToken(8, 8, 8)),
    "int4": Method("int4", Full(), PerToken(4, 4, 8)),
    "rot4": Method("rot4", Full(), PerToken(4, 4, 8, rotate=True)),
    "kivi4": Method("kivi4", Full(), Kivi(4, 4, 8, 8)),
    "turbo4": Method("turbo4", Full(), Turbo(4)),
    "fp8": Method("fp8", Full(), Fp8()),
    "h2o+int4": Method("h2o+int4", H2O(BUDGET), PerToken(4, 4, 8)),
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(measure_errors(run_context_of(MODEL, METHODS, TEXT), SETTINGS))


def prompt_and_query() -> tuple[Any, Tensor, int]:
    """An exact pass over 41 tokens, the prompt of 40 and the query of the token after it."""
    ids, observation = TEXT[None, : CONTEXT + 1], QueriesAt((CONTEXT,))
    record = prefill(MODEL, ids, observations=[observation])
    return record, ids[:, :CONTEXT], CONTEXT


@pytest.mark.parametrize("name", ["int8", "rot4", "turbo4", "fp8", "kivi4", "h2o", "adakv"])
def test_contents_are_what_attention_reads(name: str) -> None:
    """Held keys and values, in the model's basis, give the probabilities and the output that the layer computes."""
    record, ids, seen = prompt_and_query()
    cache = build_cache(MODEL, METHODS[name], ids, 4, kernel="reference")
    assert isinstance(cache, KVCache)
    for layer, exact in zip(cache.attention_layers, record.layers, strict=True):
        query = exact.observed[QueriesAt((seen,))]
        found = contents(layer, query, exact.scoring)
        empty = (found.position == EMPTY).unsqueeze(2)
        scores = (query.unflatten(1, (2, 2)).squeeze(-2) @ found.keys.mT) * exact.scoring.scaling  # [B, Hkv, G, S]
        expected = scores.masked_fill(empty, -torch.inf).softmax(-1)
        torch.testing.assert_close(found.probabilities, expected, atol=1e-5, rtol=1e-4)
        output = (expected @ found.values).flatten(1, 2).unsqueeze(-2)
        torch.testing.assert_close(found.output, output, atol=1e-5, rtol=1e-4)


def test_contents_hold_the_exact_keys_of_kept_tokens() -> None:
    record, ids, seen = prompt_and_query()
    cache = build_cache(MODEL, METHODS["h2o"], ids, 4, kernel="reference")
    assert isinstance(cache, KVCache)
    layer, exact = cache.attention_layers[0], record.layers[0]
    found = contents(layer, exact.observed[QueriesAt((seen,))], exact.scoring)
    held = sorted(int(p) for p in found.position[0, 1] if p != EMPTY)
    assert held == layer.kept_positions()[0, 1].tolist()
    for slot, position in enumerate(found.position[0, 1].tolist()):
        if position != EMPTY:
            torch.testing.assert_close(found.keys[0, 1, slot], exact.key[0, 1, position], atol=1e-5, rtol=1e-5)


def test_looking_changes_nothing() -> None:
    record, ids, seen = prompt_and_query()
    caches = [build_cache(MODEL, METHODS["h2o+int4"], ids, 4, kernel="reference") for _ in range(2)]
    for layer, exact in zip(caches[0].attention_layers, record.layers, strict=True):  # type: ignore[union-attr]
        contents(layer, exact.observed[QueriesAt((seen,))], exact.scoring)
    logits = [step(MODEL, TEXT[None, CONTEXT : CONTEXT + 1], cache) for cache in caches]
    assert torch.equal(*logits)


def made(shift: float, noise: float, drop: int = 0) -> tuple[Contents, Tensor, Tensor, Tensor]:
    """A layer with 2 KV heads of 2 query heads, its keys moved by a constant and by noise, its first tokens dropped."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, n, 8, generator=draw) for heads, n in ((4, 1), (2, 30), (2, 30)))
    held = key + shift * torch.randn(8, generator=draw) + noise * torch.randn(key.shape, generator=draw)
    held, kept = held[:, :, drop:], value[:, :, drop:]
    output, probabilities = attend(query, [Dense(held)], [Dense(kept)], SCORING)
    position = torch.arange(drop, 30).expand(1, 2, -1)
    return Contents(held, kept, position, output, probabilities.squeeze(-2)), query, key, value


def test_a_constant_added_to_all_keys_changes_their_cosine_and_not_the_attention() -> None:
    found, query, key, value = made(shift=2.0, noise=0.0)
    errors = layer_errors(found, query, key, value, SCORING)
    assert float(errors["key_cosine"].max()) < 0.9 and float(errors["key_error"].min()) > 0.5
    for name in ("logit_error", "attention_kl", "output_error"):
        assert float(errors[name].max()) < 1e-5, name
    assert float(errors["logit_correlation"].min()) > 1 - 1e-5


def test_errors_by_hand() -> None:
    found, query, key, value = made(shift=0.0, noise=0.3)
    errors = layer_errors(found, query, key, value, SCORING)
    head = 1
    p, q = [], []
    for g in (2, 3):  # the query heads of KV head 1
        exact, held = (SCORING.scaling * (keys[0, head] @ query[0, g, 0]) for keys in (key, found.keys))
        p.append(exact)
        q.append(held)
    expected = {
        "key_error": float((found.keys - key)[0, head].norm() / key[0, head].norm()),
        "value_error": 0.0,
        "key_cosine": float(torch.nn.functional.cosine_similarity(found.keys, key, dim=-1)[0, head].mean()),
        "logit_error": sum(float((b - a).std(correction=0)) for a, b in zip(p, q, strict=True)) / 2,
        "logit_correlation": sum(float(torch.corrcoef(torch.stack([a, b]))[0, 1]) for a, b in zip(p, q, strict=True))
        / 2,
        "attention_kl": sum(
            float((b.softmax(0) * (b.log_softmax(0) - a.log_softmax(0))).sum()) for a, b in zip(p, q, strict=True)
        )
        / 2,
        "output_error": sum(
            float(((b.softmax(0) - a.softmax(0)) @ value[0, head]).norm() / (a.softmax(0) @ value[0, head]).norm())
            for a, b in zip(p, q, strict=True)
        )
        / 2,
    }
    assert set(expected) == set(METRICS)
    for name, one in expected.items():
        assert float(errors[name][0, head]) == pytest.approx(one, abs=2e-5), name


def test_attention_kl_of_a_subset_is_minus_the_logarithm_of_its_mass() -> None:
    found, query, key, value = made(shift=0.0, noise=0.0, drop=20)
    mass = [(SCORING.scaling * (key[0, g // 2] @ query[0, g, 0])).softmax(0)[20:].sum() for g in range(4)]
    expected = [-(math.log(mass[2 * h]) + math.log(mass[2 * h + 1])) / 2 for h in range(2)]
    assert layer_errors(found, query, key, value, SCORING)["attention_kl"][0].tolist() == pytest.approx(
        expected, rel=1e-4
    )


def test_the_full_cache_has_no_error(rows: list[Row]) -> None:
    for metric in ("key_error", "value_error", "logit_error", "attention_kl", "output_error", "residual_error", "kl"):
        assert abs(value(rows, "full", metric)) < 1e-5, metric
    assert value(rows, "full", "key_cosine") == pytest.approx(1)
    assert value(rows, "full", "engaged") == 0


def test_more_bits_less_error_and_a_store_keeps_every_token(rows: list[Row]) -> None:
    for metric in ("key_error", "value_error", "logit_error", "attention_kl", "output_error", "residual_error", "kl"):
        assert 0 < value(rows, "int8", metric) < value(rows, "int4", metric), metric
    assert value(rows, "int4", "kept_tokens") == CONTEXT + TOKENS - 1
    assert value(rows, "h2o", "kept_tokens") == BUDGET


def test_eviction_leaves_keys_of_the_prompt_alone(rows: list[Row]) -> None:
    """Only decoded tokens inherit errors from the layers below: keys stay far closer than the attention output."""
    assert value(rows, "h2o", "key_error") < 0.2 * value(rows, "h2o", "output_error")
    assert value(rows, "h2o", "attention_kl") > 0.05


def test_every_metric_has_a_row_and_the_worst_layer_is_no_better_than_the_mean(rows: list[Row]) -> None:
    for method in METHODS:
        found = {row.metric for row in rows if row.method == method}
        assert {*METRICS, "residual_error", "kl", "engaged", "kept_tokens"} <= found
        assert value(rows, method, "output_error_worst_layer") >= value(rows, method, "output_error") - 1e-9
        worst = value(rows, method, "logit_correlation_worst_layer")
        assert worst <= value(rows, method, "logit_correlation") + 1e-9


def test_samples_hold_a_map_whose_mean_is_the_row() -> None:
    (found,) = measure_errors(run_context_of(MODEL, {"full": METHODS["full"], "int4": METHODS["int4"]}, TEXT), SETTINGS)
    maps = [torch.tensor(sample["methods"][1]["output_error"]) for sample in found.samples]
    assert {tuple(one.shape) for one in maps} == {(2, 2)} and found.samples[0]["methods"][1]["layers"] == [0, 1]
    mean = float(torch.stack(maps).mean())
    assert mean == pytest.approx(value(found.rows, "int4", "output_error"), rel=1e-3)
    assert len({sample["sha256"] for sample in found.samples}) == SETTINGS.windows


def test_batches_do_not_matter() -> None:
    named = {"full": METHODS["full"], "random": Method("random", Random(BUDGET), DenseStore())}
    one, three = (
        rows_of(measure_errors(run_context_of(MODEL, named, TEXT), replace(SETTINGS, batch=batch))) for batch in (1, 3)
    )
    for metric in ("output_error", "kl"):
        assert value(one, "random", metric) == pytest.approx(value(three, "random", metric), rel=1e-4)


def test_evaluated_tokens_are_spread_and_the_last_is_among_them() -> None:
    assert Error(tokens=64, points=4).evaluated() == [1, 22, 42, 63]
    assert Error(tokens=2, points=4).evaluated() == [1]
    assert Error(tokens=64, points=1).evaluated() == [63]


def test_what_holds_no_keys_and_values_is_refused() -> None:
    with pytest.raises(UserError, match="method=recompute holds no slots"):
        SETTINGS.refuse(Method("recompute", Recompute(), DenseStore()))
    shape = replace(shape_of(MODEL.config), mla="latent")
    target = Target(ModelSpec("tiny"), shape, Text("t", "", ""), TEXT, (), None, (), 0)
    with pytest.raises(UserError, match="caches latents"):
        SETTINGS.prepare(target)
