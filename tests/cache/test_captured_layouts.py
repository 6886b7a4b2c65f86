"""The captured step of other layouts than a slot for each token and KV head, against the eager one."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache import decode_kernel
from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import step
from kvbench.cache.paged import PagedStore
from kvbench.cache.prefix import PrefixPool, blocks_needed
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.kernels.triton_decode import TritonKernel
from kvbench.methods.adakv import AdaKV
from kvbench.methods.duo import Duo
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from tests.cache.test_captured import (
    MODEL,
    R,
    check_break_leaves_no_trace,
    check_capture_after_a_question,
    check_no_step_waits,
    check_replays,
    replaying,
)
from tests.cache.test_mla import deepseek
from tests.shared.families import random_ids, tiny

LATENTS: dict[str, tuple[KeepRule, Store]] = {
    "full": (Full(), DenseStore()),
    "fp16": (Full(), DenseStore("float16")),
    "int8": (Full(), PerToken(8, 8, 16)),
    "rot4": (Full(), PerToken(4, 4, 16, rotate=True)),
    "h2o": (H2O(budget=40), DenseStore()),
    "h2o+int4": (H2O(budget=40), PerToken(4, 4, 16)),
    "tova+int8": (Tova(budget=40), PerToken(8, 8, 16)),
    "streaming": (StreamingLLM(budget=80, variant="absolute"), DenseStore()),
}
IN_HEADS = ("full", "rot4", "h2o+int4")


@pytest.mark.parametrize("name", LATENTS)
def test_absorbed_latents(name: str) -> None:
    check_replays(deepseek(layout="absorbed", yarn=True), Method(name, *LATENTS[name]))


@pytest.mark.parametrize("name", IN_HEADS)
def test_latents_made_into_heads(name: str) -> None:
    check_replays(deepseek(layout="latent"), Method(name, *LATENTS[name]))


@pytest.mark.parametrize("store", [DenseStore(), Kivi(4, 4, 8, R)], ids=["dense", "kivi4"])
def test_expanded_heads(store: Store) -> None:
    check_replays(deepseek(layout="expand"), Method("m", Full(), store))


def test_on_a_gpu_the_kernel_named_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads neither channels in two places nor blocks of a pool: a step over those runs the reference."""
    monkeypatch.setattr(decode_kernel, "choose", lambda *_: TritonKernel())
    full, paged = Method("m", Full(), DenseStore()), Method("m", Full(), PagedStore())
    models = {layout: deepseek(layout=layout) for layout in ("absorbed", "latent")}
    for model, method, name in (
        (models["absorbed"], full, "reference"),
        (models["latent"], full, "triton"),
        (tiny("llama"), full, "triton"),
        (tiny("llama"), paged, "reference"),
    ):
        assert decode_kernel.decode_kernel(method, model, torch.float32, "auto").name == name


@pytest.mark.parametrize(
    ("layout", "name"),
    [("expand", "full"), *(("latent", name) for name in IN_HEADS), *(("absorbed", name) for name in LATENTS)],
)
def test_no_step_of_latent_attention_waits(layout: str, name: str) -> None:
    check_no_step_waits(deepseek(layout=layout), Method(name, *LATENTS[name]))


RAGGED = {
    "appending": (AdaKV(budget=40, inner=SnapKV(budget=40)), DenseStore()),
    "holding": (AdaKV(budget=40, inner=SnapKV(budget=40, decode="evict")), DenseStore()),
    "some growing": (
        Duo(40, n_sink=2, window=6, retrieval={0: torch.tensor([0.2, 0.9]), 1: torch.tensor([0.1, 0.3])}),
        DenseStore(),
    ),
    "holding+int4": (AdaKV(budget=40, floor=0, inner=H2O(budget=40)), PerToken(4, 4)),
}
PAGES = {
    "full": (Full(), PagedStore(block_size=4)),
    "full+int8": (Full(), PagedStore(PerToken(8, 8), block_size=8)),
    "h2o": (H2O(budget=40), PagedStore(block_size=8)),
    "h2o filling": (H2O(budget=80), PagedStore(block_size=8)),
}
IN_BLOCKS = RAGGED | PAGES


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_of_a_pool(name: str) -> None:
    check_replays(MODEL, Method(name, *IN_BLOCKS[name]))
    check_no_step_waits(MODEL, Method(name, *IN_BLOCKS[name]))


@pytest.mark.parametrize("name", ["appending", "holding", "some growing", "full", "h2o filling"])
def test_blocks_of_a_pool_after_a_question(name: str) -> None:
    check_capture_after_a_question(MODEL, Method(name, *IN_BLOCKS[name]))


def test_blocks_that_are_copied_between_replays() -> None:
    """Three sequences share a prompt's blocks and decode in turns, each by its own tape."""
    ids, tokens, paged = random_ids(1, 62), random_ids(3, 20, seed=2), Method("full", Full(), PagedStore())
    pool = PrefixPool(MODEL, paged, blocks_needed([ids] * 3, 20))
    decoders = [replaying(MODEL, pool.admit(MODEL, paged, ids, 20)) for _ in tokens]
    alone = [build_cache(MODEL, Method("full", Full(), DenseStore()), ids, 20) for _ in tokens]
    for i in range(20):
        for row, (decoder, cache) in enumerate(zip(decoders, alone, strict=True)):
            token = tokens[row : row + 1, i : i + 1]
            torch.testing.assert_close(decoder.feed(token), step(MODEL, token, cache), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["holding", "h2o"])
def test_a_step_in_blocks_that_breaks_off_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_break_leaves_no_trace(MODEL, Method(name, *IN_BLOCKS[name]), monkeypatch)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "dtype", "atol"), [("lfm2", torch.float64, 1e-9), ("qwen3-next", torch.float32, 1e-5)]
)
def test_hybrids(name: str, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are written in place, in every step; linear attention and experts compute in float32 at most."""
    model, method = tiny(name).to(dtype), Method("h2o", H2O(budget=40), DenseStore())
    check_replays(model, method, atol)
    check_break_leaves_no_trace(model, method, monkeypatch, atol)
    check_no_step_waits(model.to(torch.bfloat16), method)  # what experts are multiplied by wants them so
