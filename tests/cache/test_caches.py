"""A cache at the end of its plan: a forward that does not fit is refused in every layer, and nothing has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.cache.build import Method, build_cache
from kvbench.cache.caches import KVCache
from kvbench.cache.counters import CacheFull
from kvbench.cache.decode import step
from kvbench.cache.layer import SlotLayer
from kvbench.methods.full import Full
from tests.cache.test_bytes import DENSE, METHODS
from tests.shared.families import exact_llama, random_ids, tiny

pytestmark = pytest.mark.engine


def snapshot(cache: KVCache) -> list[object]:
    """Everything that a refused forward must leave as it was."""
    numbers: list[object] = [
        {name: value for name, value in vars(layer).items() if isinstance(value, int | float)} for layer in cache.layers
    ]
    numbers += [replace(layer.counters) for layer in cache.layers]
    numbers += [layer.slots.length for layer in cache.layers if isinstance(layer, SlotLayer)]
    return [cache.positions_processed, numbers, *(buffer.tensor.clone() for buffer in cache.buffers())]


def unchanged(before: list[object], cache: KVCache) -> bool:
    after = snapshot(cache)
    return before[:2] == after[:2] and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before[2:], after[2:], strict=True)
    )


@pytest.mark.parametrize("name", ["full", "kivi4"])
def test_past_the_plan_the_cache_is_full_and_unchanged(name: str) -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 60)
    cache = build_cache(model, Method(name, *METHODS[name]), ids[:, :40], max_new_tokens=5, max_step=4)
    step(model, ids[:, 40:43], cache)
    before = snapshot(cache)
    with pytest.raises(CacheFull, match="larger max_new_tokens"):
        step(model, ids[:, 43:46], cache)
    assert unchanged(before, cache)
    got = [step(model, ids[:, at : at + 1], cache) for at in (43, 44)]
    roomy = build_cache(model, Method(name, *METHODS[name]), ids[:, :40], max_new_tokens=20, max_step=4)
    step(model, ids[:, 40:43], roomy)
    want = [step(model, ids[:, at : at + 1], roomy) for at in (43, 44)]
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    with pytest.raises(CacheFull):
        step(model, ids[:, 45:46], cache)


@pytest.mark.parametrize("name", METHODS)
def test_a_longer_step_than_planned_is_refused_and_changes_nothing(name: str) -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 60)
    cache = build_cache(model, Method(name, *METHODS[name]), ids[:, :40], max_new_tokens=20, max_step=2)
    step(model, ids[:, 40:42], cache)
    before = snapshot(cache)
    with pytest.raises(CacheFull, match="max_step=5"):
        step(model, ids[:, 42:47], cache)
    assert unchanged(before, cache)
    step(model, ids[:, 42:44], cache)
    assert cache.get_seq_length() == 44


def test_a_model_with_window_layers_is_refused_as_a_whole() -> None:
    """Its window layers could go on for ever, its full layers cannot: none of them takes the token."""
    model, ids = tiny("gemma2"), random_ids(1, 60)
    cache = build_cache(model, Method("full", Full(), DENSE), ids[:, :40], max_new_tokens=2)
    step(model, ids[:, 40:41], cache)
    step(model, ids[:, 41:42], cache)
    before = snapshot(cache)
    with pytest.raises(CacheFull):
        step(model, ids[:, 42:43], cache)
    assert unchanged(before, cache)


def test_evicting_caches_go_on_past_the_plan() -> None:
    """A bounded cache has room for ever: the plan only sizes what grows."""
    model, ids = exact_llama(4, 2), random_ids(1, 90)
    cache = build_cache(model, Method("h2o", *METHODS["h2o"]), ids[:, :40], max_new_tokens=3)
    for at in range(40, 90):
        step(model, ids[:, at : at + 1], cache)
    assert (cache.kept_tokens, cache.get_seq_length()) == (16, 90)
