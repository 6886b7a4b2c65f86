"""Greedy generation, and that the user's model is unchanged afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method, build_cache
from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import generate, step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.recompute import Recompute
from tests.shared.families import exact_llama, random_ids, tiny

pytestmark = pytest.mark.engine


def greedy(model: LlamaForCausalLM, ids: Tensor, n: int) -> Tensor:
    """The stock loop: the whole text through the model for every new token."""
    for _ in range(n):
        token = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, token[:, None]], dim=1)
    return ids[:, -n:]


def cache_of(model: LlamaForCausalLM, ids: Tensor, rule: KeepRule | None = None, step: int = 1) -> AnyCache:
    return build_cache(model, Method("m", rule or Full(), DenseStore()), ids, 40, max_step=step)


@pytest.mark.parametrize("rule", [Full(), Recompute(), H2O(budget=60)], ids=lambda rule: rule.name)
def test_greedy_equals_the_stock_loop(rule: KeepRule) -> None:
    model, ids = exact_llama(6, 2), random_ids(3, 20)
    got = generate(model, None, cache_of(model, ids, rule), 25)
    assert got.shape == (3, 25)
    assert torch.equal(got, greedy(model, ids, 25))


@pytest.mark.parametrize("rule", [Full(), Recompute()], ids=lambda rule: rule.name)
def test_a_question_goes_first(rule: KeepRule) -> None:
    model, ids, question = exact_llama(6, 2), random_ids(2, 20), random_ids(2, 7, seed=1)
    got = generate(model, question, cache_of(model, ids, rule, step=7), 12)
    assert torch.equal(got, greedy(model, torch.cat([ids, question], dim=1), 12))


def test_only_what_is_needed_is_fed() -> None:
    """20 prompt tokens, 3 of a question, and of 8 new tokens all but the last."""
    model, ids = exact_llama(4, 2), random_ids(1, 20)
    cache = cache_of(model, ids, step=3)
    generate(model, random_ids(1, 3, seed=1), cache, 8)
    assert cache.positions_processed == 20 + 3 + 7
    assert cache.get_seq_length() == 30


def test_going_on_from_the_last_token() -> None:
    model, ids = exact_llama(4, 2), random_ids(2, 20)
    whole = generate(model, None, cache_of(model, ids), 12)
    cache = cache_of(model, ids)
    first = generate(model, None, cache, 5)
    rest = generate(model, first[:, -1:], cache, 7)
    assert torch.equal(torch.cat([first, rest], dim=1), whole)


def test_every_row_stops_at_its_own_end() -> None:
    """The end token is one that row 0 produces: row 0 repeats it from there on, the others go on as without it."""
    model, ids = exact_llama(6, 2), random_ids(3, 20)
    free = generate(model, None, cache_of(model, ids), 20)
    end = int(free[0, 4])
    got = generate(model, None, cache_of(model, ids), 20, eos_token_id=end)
    for row in range(3):
        wanted = free[row].tolist()
        if end in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        own = got[row].tolist()
        assert own[: len(wanted)] == wanted[: len(own)]
        assert set(own[len(wanted) :]) <= {end}
    assert got[0, 4:].eq(end).all() or free[0, :4].eq(end).any()


def test_it_stops_once_all_rows_have_ended() -> None:
    model, ids = exact_llama(6, 2), random_ids(1, 20)
    free = generate(model, None, cache_of(model, ids), 20)[0].tolist()
    for end in (free[0], free[6]):
        first = free.index(end)
        got = generate(model, None, cache_of(model, ids), 20, eos_token_id=end)
        assert got[0].tolist() == free[: first + 1]


def test_bad_calls() -> None:
    model, ids = exact_llama(4, 2), random_ids(2, 20)
    cache = cache_of(model, ids)
    for n in (0, -3):
        with pytest.raises(UserError, match="max_new_tokens=1 or more"):
            generate(model, None, cache, n)
    generate(model, None, cache, 3)
    with pytest.raises(UserError, match="has been fed since its prompt; give the ids"):
        generate(model, None, cache, 3)


# ---------------------------------------------------------------- the user's model afterwards


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_models_own_attention_is_back_afterwards(attention: str) -> None:
    """And gives what it gave before: the logits of a stock forward between two of ours are the same bits."""
    model, ids = tiny("llama", attention=attention), random_ids(2, 30)
    before = model(input_ids=ids).logits
    cache = cache_of(model, ids, H2O(budget=10))
    assert model.config._attn_implementation == attention
    assert torch.equal(model(input_ids=ids).logits, before)
    step(model, ids[:, :1], cache)
    generate(model, ids[:, :1], cache, 3)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_and_after_an_exception(attention: str) -> None:
    model, ids = tiny("llama", attention=attention), random_ids(1, 20)
    with pytest.raises(RuntimeError, match="in the middle"), kvbench_attention(model):
        assert model.config._attn_implementation == "kvbench"
        raise RuntimeError("in the middle")
    assert model.config._attn_implementation == attention
    outside = ids.clone()
    outside[0, 3] = 10_000
    with pytest.raises(UserError):
        cache_of(model, outside)
    cache = cache_of(model, ids)
    with pytest.raises(UserError, match="the token 10000, and this model's tokens are 0 to 96"):
        step(model, outside[:, 3:4], cache)

    def breaks_off(*given: object) -> None:
        raise RuntimeError("in the model")

    hook = model.get_input_embeddings().register_forward_pre_hook(breaks_off)
    with pytest.raises(RuntimeError, match="in the model"):
        step(model, random_ids(1, 1), cache)
    hook.remove()
    assert model.config._attn_implementation == attention
    assert cache.get_seq_length() == cache.positions_processed == 20


def test_blocks_can_be_nested() -> None:
    model = tiny("llama", attention="sdpa")
    with kvbench_attention(model):
        with kvbench_attention(model):
            pass
        assert model.config._attn_implementation == "kvbench"
    assert model.config._attn_implementation == "sdpa"


def test_weights_and_gradients_are_left_alone() -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 20)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = model.training
    logits = generate(model, None, cache_of(model, ids), 3)
    assert not logits.requires_grad and model.training == training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
