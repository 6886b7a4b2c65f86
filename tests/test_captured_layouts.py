"""The captured step of other layouts than a slot for each token and KV head, against the eager one."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.build import Method
from kvbench.cache.paged import PagedStore
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from tests.families import tiny
from tests.test_captured import MODEL, R, check_break_leaves_no_trace, check_no_step_waits, check_replays
from tests.test_mla import deepseek

LATENTS: dict[str, tuple[KeepRule, Store]] = {
    "full": (Full(), DenseStore()), "fp16": (Full(), DenseStore("float16")), "int8": (Full(), PerToken(8, 8, 16)),
    "rot4": (Full(), PerToken(4, 4, 16, rotate=True)), "h2o": (H2O(budget=40), DenseStore()),
    "h2o+int4": (H2O(budget=40), PerToken(4, 4, 16)), "tova+int8": (Tova(budget=40), PerToken(8, 8, 16)),
    "streaming": (StreamingLLM(budget=80, variant="absolute"), DenseStore()),
}  # fmt: skip
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


@pytest.mark.parametrize(("layout", "name"), [("expand", "full"), *(("latent", name) for name in IN_HEADS),
                                              *(("absorbed", name) for name in LATENTS)])  # fmt: skip
def test_no_step_of_latent_attention_waits(layout: str, name: str) -> None:
    check_no_step_waits(deepseek(layout=layout), Method(name, *LATENTS[name]))


RAGGED = {
    "appending": (AdaKV(budget=40, inner=SnapKV(budget=40)), DenseStore()),
    "holding": (AdaKV(budget=40, inner=SnapKV(budget=40, decode="evict")), DenseStore()),
    "holding+int4": (AdaKV(budget=40, floor=0, inner=H2O(budget=40)), PerToken(4, 4)),
}
PAGES = {
    "full": (Full(), PagedStore(block_size=4)), "full+int8": (Full(), PagedStore(PerToken(8, 8), block_size=8)),
    "h2o": (H2O(budget=40), PagedStore(block_size=8)), "h2o filling": (H2O(budget=80), PagedStore(block_size=8)),
}  # fmt: skip
IN_BLOCKS = RAGGED | PAGES


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_of_a_pool(name: str) -> None:
    check_replays(MODEL, Method(name, *IN_BLOCKS[name]))
    check_no_step_waits(MODEL, Method(name, *IN_BLOCKS[name]))


@pytest.mark.parametrize("name", ["holding", "h2o"])
def test_a_step_in_blocks_that_breaks_off_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_break_leaves_no_trace(MODEL, Method(name, *IN_BLOCKS[name]), monkeypatch)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_hybrids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are written in place, in every step."""
    model, method = tiny(name), Method("h2o", H2O(budget=40), DenseStore())
    check_replays(model, method, atol=1e-4)
    check_break_leaves_no_trace(model, method, monkeypatch, atol=1e-4)
    check_no_step_waits(model.to(torch.bfloat16), method)  # what experts are multiplied by wants them so
