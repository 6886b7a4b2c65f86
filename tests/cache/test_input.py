"""Bad input to the engine: one line each, with what to type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.cache.attention import attention, kvbench_attention
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.decode import step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import exact_llama, random_ids

pytestmark = pytest.mark.engine

DENSE = DenseStore()
RULES = pytest.mark.parametrize("rule", [H2O, StreamingLLM, Random])


def refused(call: object, *named: str) -> str:
    """The one line that a call is refused with; every word of `named` is in it."""
    with pytest.raises(UserError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and line.strip() == line
    for word in named:
        assert word in line, line
    return line


@RULES
@pytest.mark.parametrize(
    "budget", [0, -1, -256, 1.0, 1.5, 0.0, -0.25, 256.0, "25%", "256", True, False, float("nan"), float("inf"), [256]]
)
def test_what_is_no_budget(rule: type[KeepRule], budget: object) -> None:
    line = refused(lambda: rule(budget=budget), "budget=256", "budget=0.25")
    assert line.startswith(f"budget={budget} ")


@RULES
def test_smallest_budget_is_allowed_and_one_less_is_not(rule: type[KeepRule]) -> None:
    smallest = rule(budget=100).smallest_budget
    assert rule(budget=smallest).budget == smallest
    line = refused(lambda: rule(budget=smallest - 1))
    # A budget of 0 is no budget at all; the others name the fixed part.
    assert f"type budget={smallest} or more" in line or smallest == 1


@pytest.mark.parametrize("rule", [Full, Recompute])
def test_a_rule_that_drops_nothing_takes_no_budget(rule: type[KeepRule]) -> None:
    refused(lambda: rule(budget=64), "budget=64", "leave budget= out")


@RULES
def test_share_that_comes_out_below_the_fixed_part(rule: type[KeepRule]) -> None:
    """Refused once the prompt is known, and nothing is built."""
    model, ids = exact_llama(4, 2), random_ids(1, 30)
    smallest = rule(budget=100).smallest_budget
    method = Method("m", rule(budget=0.01), DENSE)
    refused(
        lambda: build_cache(model, method, ids), "budget=0.01", "30-token prompt", f"type budget={smallest} or more"
    )
    cache = build_cache(model, Method("m", rule(budget=0.5), DENSE), ids)
    assert cache.kept_tokens == 15


@RULES
def test_evicting_rule_with_an_append_only_store(rule: type[KeepRule]) -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 30)
    method = Method("h2o+kivi4", rule(budget=16), Kivi(4, 4, 8, 16))
    refused(lambda: build_cache(model, method, ids), "method=h2o+kivi4", "store=dense, int8, int4, int2")


@pytest.mark.parametrize("store", [Kivi(4, 4, 32, 32), PerToken(4, 4, 32)], ids=["kivi", "per_token"])
def test_group_that_does_not_divide_the_models_head(store: object) -> None:
    model, ids = exact_llama(4, 2, head_dim=16), random_ids(1, 30)
    refused(
        lambda: build_cache(model, Method("m", Full(), store), ids), "group=32", "head size 16", "group=8, group=16"
    )


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 2, 3]],
        np.ones((1, 3), dtype=np.int64),
        None,
        torch.ones(1, 3),
        torch.ones(1, 3, dtype=torch.int32),
        torch.ones(1, 3, dtype=torch.bool),
        torch.ones(3, dtype=torch.int64),
        torch.ones(1, 1, 3, dtype=torch.int64),
        torch.ones(2, 0, dtype=torch.int64),
    ],
    ids=["list", "numpy", "none", "float", "int32", "bool", "flat", "deep", "empty"],
)
def test_ids_of_the_wrong_kind(ids: object) -> None:
    """For the prompt and for a step; the cache is as before."""
    model = exact_llama(4, 2)
    refused(lambda: prefill(model, ids), "ids is", "int64", "[batch, tokens]")
    cache = build_cache(model, Method("full", Full(), DENSE), random_ids(1, 10))
    refused(lambda: step(model, ids, cache), "ids is", "int64", "[batch, tokens]")
    assert cache.get_seq_length() == cache.positions_processed == 10


def test_a_step_of_another_batch() -> None:
    model = exact_llama(4, 2)
    cache = build_cache(model, Method("full", Full(), DENSE), random_ids(3, 10))
    for rows in (1, 2, 4):
        refused(lambda rows=rows: step(model, random_ids(rows, 1), cache), f"{rows} rows", "the cache 3")
    assert cache.get_seq_length() == cache.positions_processed == 10


def test_a_record_without_the_methods_observation() -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 30)
    record = prefill(model, ids, [StreamingLLM(budget=16), H2O(budget=16, combine="max")])
    for combine in ("sum",):
        method = Method("h2o", H2O(budget=16, combine=combine), DENSE)
        refused(lambda method=method: build_cache(model, method, record), "h2o", "prefill(model, ids, [method])")
    build_cache(model, Method("h2o", H2O(budget=8, combine="max"), DENSE), record)


@pytest.mark.parametrize("plan", [{"max_new_tokens": -1}, {"max_step": 0}, {"max_step": -2}])
def test_plans_that_cannot_be(plan: dict[str, int]) -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 10)
    refused(lambda: build_cache(model, Method("full", Full(), DENSE), ids, **plan), "max_new_tokens=", "max_step=")


# ---------------------------------------------------------------- masks


def test_a_padded_batch_is_refused() -> None:
    """At the prompt and at a step, wherever the zero is; a mask of ones says nothing and is taken."""
    model, ids = exact_llama(4, 2), random_ids(2, 12)
    for zero in (0, 5, 11):
        mask = torch.ones_like(ids)
        mask[1, zero] = 0
        with kvbench_attention(model):
            refused(lambda mask=mask: model(input_ids=ids, attention_mask=mask), "padding", "one length")
            refused(lambda mask=mask: model(input_ids=ids, attention_mask=mask.bool()), "padding", "one length")
    with kvbench_attention(model):
        got = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(got, model(input_ids=ids).logits)


class Bare(torch.nn.Module):
    """A stand-in for an attention module."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def qkv(q: int = 5, n: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, tokens, 8, generator=generator) for tokens in (q, n, n))


def test_what_the_attention_function_would_have_to_ignore_is_refused() -> None:
    """A mask, a bias, attention that is not causal, and a soft-capped step over a stock cache's keys."""
    query, key, value = qkv()
    refused(lambda: attention(Bare(), query, key, value, torch.zeros(1, 1, 5, 5)), "attention mask")
    refused(lambda: attention(Bare(), query, key, value, None, is_causal=False), "causally")
    refused(lambda: attention(Bare(is_causal=False), query, key, value, None), "causally")
    for name in ("position_bias", "alibi"):
        refused(lambda name=name: attention(Bare(), query, key, value, None, **{name: torch.zeros(1)}), name)
    one, key, value = qkv(1, 5)
    refused(lambda: attention(Bare(), one, key, value, None, softcap=5.0), "sdpa")


def test_default_scaling_is_one_over_the_root_of_the_head() -> None:
    query, key, value = qkv()
    default, explicit = (attention(Bare(), query, key, value, None, scaling=s)[0] for s in (None, 8**-0.5))
    assert torch.equal(default, explicit)
    assert default.shape == (1, 5, 2, 8)


@pytest.mark.parametrize(("rule", "store"), [(H2O(budget=16), DenseStore()), (Full(), Kivi(4, 4, 8, 8))])
def test_what_only_stock_caches_can_do_is_refused_and_changes_nothing(rule: KeepRule, store: Store) -> None:
    method, one = Method("m", rule, store), torch.tensor([1])
    model, ids = exact_llama(4, 2), random_ids(2, 42)
    cache, untouched = (build_cache(model, method, ids[:, :40], 4) for _ in range(2))
    for call in (
        cache.reset,
        lambda: cache.crop(10),
        lambda: cache.reorder_cache(one),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(one),
    ):
        refused(call, "build another: build_cache(model, method, record)")
    for t in (40, 41):
        assert torch.equal(*(step(model, ids[:, t : t + 1], each) for each in (cache, untouched)))
