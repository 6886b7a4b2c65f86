"""Hybrid models: some layers keep a state of fixed size instead of keys and values, which no method compresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, cache_utils

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.calibrate import bases_of
from kvbench.cache.decode import step
from kvbench.cache.forward import forward
from kvbench.cache.paged import PagedStore
from kvbench.cache.prefix import PrefixPool
from kvbench.cache.rotary import key_rotations
from kvbench.cache.rule import KeepRule
from kvbench.cache.size import cache_bytes
from kvbench.cache.state import StateLayer
from kvbench.cache.stock import StockStore
from kvbench.cache.store import DenseStore, Store
from kvbench.check.identities import Subject, Trial, method_identities, model_identities
from kvbench.cli.plan import planned_model, planned_shape
from kvbench.errors import UserError
from kvbench.measures.memory import Memory
from kvbench.measures.memory.cache_bytes import measure_bytes
from kvbench.measures.perplexity.token_scores import divergence
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.lowrank import LowRank
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.checkpoint import model_spec
from kvbench.models.load import describe
from kvbench.models.shape import shape_of
from tests.shared.families import HYBRIDS, random_ids, tiny
from tests.shared.text import light, methods, rows_of, run_context_of, value

pytestmark = pytest.mark.engine

PROMPT, STEPS = 40, 30
FULL = Method("full", Full(), DenseStore())
MODELS = {name: tiny(name) for name in HYBRIDS}
IDS = random_ids(2, PROMPT + STEPS)
# Of a row: two convolutions over 64 channels with 3 inputs; with 4, and four heads of 8 x 8 in float32.
STATE_NUMBERS = {"lfm2": (2 * 64 * 3, 0), "qwen3-next": (2 * 64 * 4, 2 * 4 * 8 * 8)}


@pytest.fixture(params=HYBRIDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> PreTrainedModel:
    return MODELS[name]


@torch.inference_mode()
def stock(model: PreTrainedModel, ids: Tensor, q: int = 1) -> Tensor:
    """Logits [B, STEPS + 1, V] as transformers decodes with its own cache."""
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    out = [forward(model, ids[:, :PROMPT], cache, 1)]
    out += [forward(model, ids[:, at : at + q], cache) for at in range(PROMPT, ids.shape[1], q)]
    return torch.cat(out, dim=1)


def decode(model: PreTrainedModel, cache: Any, ids: Tensor, q: int = 1) -> Tensor:
    out = [cache.last_logits[:, None]]
    out += [step(model, ids[:, at : at + q], cache, logits_to_keep=0) for at in range(PROMPT, ids.shape[1], q)]
    return torch.cat(out, dim=1)


def states(cache: KVCache) -> list[Tensor]:
    return [tensor for state in cache.states for tensor in state.tensors()]


@pytest.mark.parametrize("q", [1, 3])
def test_full_equals_the_stock_model(model: PreTrainedModel, q: int) -> None:
    """30 steps of one token, and 10 of three: within 1e-5 of the largest logit. h2o with room for all is the same."""
    want = stock(model, IDS, q)
    tolerance = 1e-5 * want.abs().max().item()
    for rule in (Full(), H2O(budget=PROMPT + STEPS)):
        cache = build_cache(model, Method("m", rule, DenseStore()), IDS[:, :PROMPT], STEPS, max_step=q)
        torch.testing.assert_close(decode(model, cache, IDS, q), want, atol=tolerance, rtol=0)
        assert not cache.has_compressed and cache.kept_tokens == cache.seen == PROMPT + STEPS


@pytest.mark.parametrize(
    ("rule", "store"),
    [(H2O(budget=16), DenseStore()), (StreamingLLM(budget=16), DenseStore()), (Full(), Kivi(4, 4, 8, 8))],
    ids=["h2o", "streaming_llm", "kivi"],
)
def test_methods_apply_to_the_attention_layers_alone(model: PreTrainedModel, rule: KeepRule, store: Store) -> None:
    """They hold their budget; the first layer's state, before any attention, is as the full cache has it."""
    record = prefill(model, IDS[:, :PROMPT], [rule])
    cache, full = (build_cache(model, method, record, STEPS) for method in (Method("m", rule, store), FULL))
    assert isinstance(cache, KVCache) and isinstance(full, KVCache)
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [True, False] * 2
    assert [layer.index for layer in cache.compressible] == [1, 3] and cache.compressible == cache.attention_layers
    sizes = [tensor.shape for tensor in states(cache)]
    got, want = decode(model, cache, IDS), decode(model, full, IDS)
    assert not torch.allclose(got[:, -1], want[:, -1], atol=1e-3)
    expected = PROMPT + STEPS if isinstance(rule, Full) else 16
    assert cache.has_compressed and {layer.kept for layer in cache.compressible} == {cache.kept_tokens} == {expected}
    assert [tensor.shape for tensor in states(cache)] == sizes
    for ours, theirs in zip(cache.states[0].tensors(), full.states[0].tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_budgets_by_depth_count_attention_layers_alone(model: PreTrainedModel) -> None:
    rule = Pyramid(budget=16, window=4, beta=4)
    cache = build_cache(model, Method("pyramid", rule, DenseStore()), IDS[:, :PROMPT], 1)
    assert [layer.kept for layer in cache.attention_layers] == [rule.layer_tokens(PROMPT, i, 2) for i in (0, 1)]
    assert cache.kept_tokens == 16


def test_caches_of_one_record_leave_each_other_alone(model: PreTrainedModel) -> None:
    """In turns as alone, and the record is as it was: a third cache does as the first."""
    record = prefill(model, IDS[:, :PROMPT], [H2O(budget=16)])
    before = [tensor.clone() for state in record.states for tensor in state.tensors()]
    alone = decode(model, build_cache(model, FULL, record, STEPS), IDS)
    evicts = Method("h2o", H2O(budget=16), DenseStore())
    one, other = (build_cache(model, method, record, STEPS) for method in (FULL, evicts))
    shared = {tensor.data_ptr() for tensor in (*states(one), *before)}
    assert not shared & {tensor.data_ptr() for tensor in states(other)}
    found = [one.last_logits[:, None]]
    for at in range(PROMPT, PROMPT + STEPS):
        step(model, IDS.flip(-1)[:, at : at + 1], other)
        found.append(step(model, IDS[:, at : at + 1], one))
    torch.testing.assert_close(torch.cat(found, dim=1), alone, rtol=0, atol=0)
    after = [tensor for state in record.states for tensor in state.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, states(one), strict=True))


@pytest.mark.parametrize("rule", [Full(), H2O(budget=24)], ids=["full", "h2o"])
def test_the_identities_hold(model: PreTrainedModel, rule: KeepRule) -> None:
    trial = Trial(model, IDS[:, :48], IDS[:, 48:60], "auto", [rule])
    verdicts = list(model_identities(trial, FULL, Method("kivi", Full(), Kivi(group_size=8, residual_length=64))))
    subject = Subject("m", lambda budget: Method("m", type(rule)(budget or 24) if rule.budget else rule, DenseStore()))
    verdicts += method_identities(trial, subject, FULL)
    assert len(verdicts) == (9 if rule.budget else 6)
    assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_bytes_of_states_are_a_part_of_their_own(name: str, model: PreTrainedModel) -> None:
    context, tokens = 40, 4
    with light():
        rows = rows_of(
            measure_bytes(
                run_context_of(model, methods("full", "h2o", "kivi", budget=10), IDS.flatten()),
                Memory([context], tokens),
            )
        )
    state, growing = 4 * sum(STATE_NUMBERS[name]), 2 * 2 * 2 * (context + tokens) * 16 * 4
    assert {value(rows, method, "held_bytes.state") for method in ("full", "h2o", "kivi")} == {state}
    assert value(rows, "full", "dense_bytes") == state + growing
    assert value(rows, "h2o", "compressible_share") == growing / (state + growing)
    assert value(rows, "full", "held_bytes") == state + growing + value(rows, "full", "held_bytes.positions")
    assert value(rows, "full", "analytic_bytes") == growing and value(rows, "full", "spare_bytes") == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [Full(), H2O(budget=16)], ids=["full", "h2o"])
def test_states_are_planned_as_they_are_held(name: str, model: PreTrainedModel, rule: KeepRule, dtype: str) -> None:
    """What linear attention sums up is float32 in a bfloat16 model as well."""
    spec = model_spec({"random": {"model_type": model.config.model_type}, "dtype": dtype, "device": "cpu"})
    planned = planned_model(spec, model.config, planned_shape(spec, model.config))
    method = Method("m", rule, DenseStore())
    narrow, wide = STATE_NUMBERS[name]
    assert planned.state_bytes == narrow * planned.dtype.itemsize + 4 * wide and len(planned.windows) == 2
    model = model if dtype == "float32" else tiny(name).bfloat16()
    cache = build_cache(model, method, IDS[:, :PROMPT], 8)
    assert held_bytes(cache.buffers()).held == cache_bytes(method, planned, 2, PROMPT, 8)


def test_what_rows_say(model: PreTrainedModel) -> None:
    shape = shape_of(model.config)
    assert (shape.arch, shape.kv_heads, shape.state_layers) == ("hybrid", 2, 2)
    assert shape.remark == "2 of 4 layers keep a state of fixed size and are left alone"


def test_a_low_rank_basis_belongs_to_its_layer(model: PreTrainedModel) -> None:
    rotations = key_rotations(model, 4)
    bases = bases_of(model, IDS, rotations)
    assert [basis is None for basis in bases] == [True, False] * 2
    store = LowRank(rank=1.0).calibrated(bases, rotations)
    got = decode(model, build_cache(model, Method("lowrank", Full(), store), IDS[:, :PROMPT], STEPS), IDS)
    want = decode(model, build_cache(model, FULL, IDS[:, :PROMPT], STEPS), IDS)
    torch.testing.assert_close(got, want, atol=1e-3 * want.abs().max().item(), rtol=0)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache")
def test_caches_of_transformers_stand_between_states(name: str, model: PreTrainedModel) -> None:
    """Twice from one record, with the same result: 8 bits of keys and values, and the states as they are."""
    record, method = prefill(model, IDS[:, :PROMPT]), Method("hf_fp8", Full(), StockStore("fp8"))
    caches = [build_cache(model, method, record) for _ in range(2)]
    one, other = (decode(model, cache, IDS) for cache in caches)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    want = stock(model, IDS)
    assert not torch.equal(one[:, 1:], want[:, 1:])
    # Measured: a mean KL of 4.7e-05 (LFM2) and 0.0016 (Qwen3-Next).
    assert divergence(want.flatten(0, 1).log_softmax(-1), one.flatten(0, 1).log_softmax(-1)).mean() < 0.01
    held = held_bytes(caches[0].buffers())
    assert held.parts["state"] == 2 * 4 * sum(STATE_NUMBERS[name])
    assert held.parts["codes"] == 2 * 2 * 2 * 2 * (PROMPT + STEPS) * 16


def test_what_has_no_form_for_states_says_so(model: PreTrainedModel) -> None:
    with pytest.raises(UserError, match="a state or a sliding window"):
        PrefixPool(model, Method("full", Full(), PagedStore()), 8)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model_type": "falcon_h1"}, "falcon_h1.* has hybrid layers.*LFM2"),
        ({"model_type": "zamba2"}, "zamba2.* has hybrid layers"),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv"] * 2}, "no attention layers"),
    ],
)
def test_other_mixtures_are_refused_before_any_weights(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        describe(model_spec({"random": settings}))
    assert "\n" not in str(refused.value)
