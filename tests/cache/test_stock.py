"""transformers' own quantised caches as comparators. Those whose package is not installed are left out."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvbench.cache import stock
from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method, build_cache, check_model, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.decode import generate, step
from kvbench.cache.forward import forward
from kvbench.cache.stock import StockCache, StockStore
from kvbench.cache.store import DenseStore, SlotShape
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.methods.snapkv import SnapKV
from tests.shared.families import tiny
from tests.shared.models import random_llama

pytestmark = pytest.mark.engine

PACKAGES = {"quanto": "optimum", "hqq": "hqq", "fp8": "torch"}
STORES: dict[str, Callable[[], StockStore]] = {
    "quanto4": lambda: StockStore("quanto", 4),
    "quanto2": lambda: StockStore("quanto", 2),
    "hqq4": lambda: StockStore("hqq", 4),
    "hqq8": lambda: StockStore("hqq", 8),
    "fp8": lambda: StockStore("fp8"),
}

LAYERS, KV_HEADS, HEAD, PROMPT = 2, 2, 64, 50
MODEL = random_llama(4, KV_HEADS, HEAD, layers=LAYERS, dtype=torch.float32)
IDS = torch.randint(0, 97, (2, PROMPT + 90), generator=torch.Generator().manual_seed(1))


def store_of(name: str) -> StockStore:
    if find_spec(PACKAGES[name.rstrip("0123456789") if name != "fp8" else name]) is None:
        pytest.skip("pip install 'kvbench[comparators]'")
    try:
        return STORES[name]()
    except UserError as error:
        if name != "fp8":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", STORES)
def test_it_decodes_as_transformers_does_with_the_same_cache(name: str) -> None:
    """Steps of one token and of several through our record and attention against transformers alone."""
    store = store_of(name)
    cache = build_cache(MODEL, Method(name, Full(), store), IDS[:, :PROMPT])
    assert isinstance(cache, StockCache) and cache.kept_tokens == PROMPT
    own = DynamicCache()
    own.layers = [store.layer() for _ in range(LAYERS)]
    own.layer_class_to_replicate = None
    with torch.inference_mode():
        forward(MODEL, IDS[:, :PROMPT], own)
        at = PROMPT
        for q in (1, 1, 5, 1):
            got = step(MODEL, IDS[:, at : at + q], cache, logits_to_keep=0)
            want = forward(MODEL, IDS[:, at : at + q], own)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            at += q
    assert cache.kept_tokens == at and cache.positions_processed == at
    assert generate(MODEL, IDS[:, at : at + 3], cache, 4).shape == (2, 4)


@pytest.mark.parametrize("name", STORES)
def test_its_bytes_are_those_of_its_tensors_and_within_one_percent_of_the_formula(name: str) -> None:
    """After 127 steps the residual of 128 is as long as it gets."""
    store = store_of(name)
    ids = torch.cat([IDS, IDS], 1)
    cache = build_cache(MODEL, Method(name, Full(), store), ids[:, :PROMPT])
    before = held_bytes(cache.buffers())
    for t in range(PROMPT, PROMPT + 127):
        step(MODEL, ids[:, t : t + 1], cache)
    held = held_bytes(cache.buffers())
    shape = SlotShape(2, KV_HEADS, HEAD, HEAD, PROMPT + 127, 1, torch.float32, torch.device("cpu"))
    assert held.held == pytest.approx(LAYERS * store.planned_bytes(shape), rel=0.01)
    rows = LAYERS * 2 * KV_HEADS * 2 * HEAD
    codes = rows * PROMPT * (8 if name == "fp8" else store.bits) // 8
    assert before.parts["codes"] == codes and before.slack == 0
    assert held.parts.get("residual", 0) == (0 if name == "fp8" else rows * 127 * 4)


def test_it_copies_the_record_and_other_methods_are_not_disturbed() -> None:
    record = prefill(MODEL, IDS[:, :PROMPT], [])
    before = [(layer.key.clone(), layer.value.clone()) for layer in record.layers]
    cache = build_cache(MODEL, Method("fp8", Full(), store_of("fp8")), record)
    for t in range(PROMPT, PROMPT + 5):
        step(MODEL, IDS[:, t : t + 1], cache)
    for layer, (key, value) in zip(record.layers, before, strict=True):
        assert torch.equal(layer.key, key) and torch.equal(layer.value, value)


def test_full_attention_through_a_plain_cache_of_transformers_is_exact() -> None:
    """The path that stock caches decode through, without quantisation: what one forward over everything gives."""
    with torch.inference_mode(), kvbench_attention(MODEL):
        cache = DynamicCache()
        forward(MODEL, IDS[:, :PROMPT], cache)
        got = torch.cat([forward(MODEL, IDS[:, a:b], cache) for a, b in ((50, 51), (51, 58), (58, 59))], 1)
        want = forward(MODEL, IDS[:, :59], None)[:, PROMPT:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_no_keep_rule_combines_with_it() -> None:
    method = Method("snapkv", SnapKV(budget=40), store_of("fp8"))
    with pytest.raises(UserError, match="choose another store for method=snapkv"):
        method.check_combination()


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(stock, "version", missing)
    with pytest.raises(UserError, match=r"hf_hqq needs hqq; type pip install 'kvbench\[comparators\]'"):
        StockStore("hqq", 8)


def test_a_model_with_windows_is_refused_before_anything_runs() -> None:
    store = store_of("fp8")
    check_model(tiny("qwen3"), Full(), store)
    check_model(tiny("gemma3"), Full(), DenseStore())
    with pytest.raises(UserError, match="no sliding-window layers.*choose methods whose names do not begin with hf_"):
        check_model(tiny("gemma3"), Full(), store)
