"""A restored cache continues with the same bits as one that never went elsewhere, for every kind of cache and store."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.prefix import PrefixPool
from kvbench.cache.snapshot import Snapshot, without_repeats
from kvbench.errors import UserError
from tests.cache.test_mla import deepseek
from tests.shared.families import HYBRIDS, random_ids, tiny
from tests.shared.models import random_llama

pytestmark = pytest.mark.engine

PROMPT, ROOM = 70, 90
MODEL = random_llama(4, 2, 64, dtype=torch.float32)
IDS = random_ids(2, PROMPT + ROOM)
KNOBS: dict[str, Any] = {"budget": 48}
ENTRIES = (
    "full+dense",
    "full+bf16",
    "full+paged",
    "full+kivi2",
    "full+kivi8",
    "h2o+dense",
    "h2o+int2",
    "h2o+paged",
    "streaming_llm+rot3",
    "tova+int8",
    "random+turbo3",
    "knorm+fp8",
    "adakv+dense",
    "adakv+rot4",
    "snapkv",
    "pyramid",
    "r_kv",
    "d2o",
    "cam",
    "recompute",
)


def method_of(entry: str) -> Method:
    knobs = KNOBS if entry.split("+")[0] not in ("full", "recompute") and not entry.startswith("hf_") else {}
    if "kivi" in entry:
        knobs = {"residual": 32}  # tokens leave the residual while the test decodes
    if entry == "r_kv":
        knobs = {"budget": 48, "buffer": 16}  # and tokens are evicted
    return load_method(entry, **knobs)


def steps(model: PreTrainedModel, cache: DecodeCache, ids: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Logits of forwards of these sizes over the next ids."""
    start, found = 0, []
    for size in sizes:
        found.append(cache.step(model, ids[:, start : start + size], size))
        start += size
    return found


def check(model: PreTrainedModel, method: Method, ids: Tensor = IDS, kernel: str = "auto") -> None:
    """Go on by other tokens, twice, and come back: logits, kept tokens, bytes and counts are those of a cache that did
    not."""

    def new() -> DecodeCache:
        return build_cache(model, method, ids[:, :PROMPT], ROOM, max_step=9, kernel=kernel)

    first, after, other = ids[:, PROMPT : PROMPT + 12], ids[:, PROMPT + 12 : PROMPT + 60], ids[:, :40]
    plain, cache = new(), new()
    steps(model, plain, first, (9, 1, 1, 1))
    steps(model, cache, first, (9, 1, 1, 1))
    kept, held = cache.kept_positions(), held_bytes(cache.buffers())
    snapshot = cache.snapshot()
    want = steps(model, plain, after, (1, 9, 1, 9, 9, 9, 1, 9))
    addresses = {tensor.data_ptr() for _, tensor, _ in cache.buffers()}
    for sizes in ((9, 9, 9, 9), (1,) * 40):
        steps(model, cache, other, sizes)
        cache.restore(snapshot)
        assert cache.seen == PROMPT + 12 and cache.positions_processed >= PROMPT + 12
        assert held_bytes(cache.buffers()) == held
        assert all(torch.equal(cache.kept_positions()[layer], found) for layer, found in kept.items())
    if not cache.replaces_tensors:
        assert {tensor.data_ptr() for _, tensor, _ in cache.buffers()} == addresses
    found = steps(model, cache, after, (1, 9, 1, 9, 9, 9, 1, 9))
    assert all(torch.equal(one, same) for one, same in zip(found, want, strict=True))
    assert cache.positions_processed == plain.positions_processed
    assert cache.kept_tokens == plain.kept_tokens and cache.has_compressed == plain.has_compressed
    for layer, positions in plain.kept_positions().items():
        assert torch.equal(cache.kept_positions()[layer], positions)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_restored_cache_gives_equal_bits(entry: str) -> None:
    check(MODEL, method_of(entry))


@pytest.mark.parametrize(
    ("layout", "entry"),
    [("expand", "h2o"), ("latent", "full"), ("latent", "h2o+int4"), ("absorbed", "full"), ("absorbed", "h2o+int4")],
)
def test_latent_attention(layout: str, entry: str) -> None:
    check(deepseek(layout=layout, dtype=torch.float32), method_of(entry))


@pytest.mark.parametrize("entry", ["h2o+int4", "adakv", "full+kivi4"])
def test_with_the_reference_kernel_too(entry: str) -> None:
    check(MODEL, method_of(entry), kernel="reference")


@pytest.mark.parametrize("name", ["hf_quanto4", "hf_hqq4", "hf_fp8"])
def test_caches_of_transformers(name: str) -> None:
    if find_spec({"hf_quanto4": "optimum", "hf_hqq4": "hqq", "hf_fp8": "torch"}[name]) is None:
        pytest.skip("pip install 'kvbench[comparators]'")
    try:
        check(MODEL, method_of(name))
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [*HYBRIDS, "gemma3"])
@pytest.mark.parametrize("entry", ["full", "h2o"])
def test_layers_with_a_state_and_layers_with_a_window(name: str, entry: str) -> None:
    check(tiny(name), method_of(entry))


def test_a_snapshot_of_another_cache_is_refused() -> None:
    one, other = (build_cache(MODEL, method_of("h2o"), IDS[:, :PROMPT], ROOM) for _ in range(2))
    with pytest.raises(UserError, match="another cache"):
        one.restore(other.snapshot())


def test_a_cache_that_shares_blocks_with_other_requests_has_no_snapshot() -> None:
    method = method_of("full+paged")
    pool = PrefixPool(MODEL, method, 40)
    cache = pool.admit(MODEL, method, IDS[:1, :PROMPT], 20)
    with pytest.raises(UserError, match="shares blocks"):
        cache.snapshot()


@dataclass(frozen=True)
class Plan:
    """Never changes, and names an object that is not to be looked into."""

    kernel: list[int]


class Holder:
    """State in tensors, numbers, lists and dicts, some of it twice."""

    def __init__(self) -> None:
        self.kernel = [1]
        self.plan = Plan(self.kernel)
        self.tensor, self.count = torch.zeros(3), 0
        self.again, self.view = self.tensor, torch.arange(4).expand(2, 4)
        self.held, self.by_name = [[1], [2]], {"a": torch.ones(1)}


def test_everything_that_can_change_is_put_back_and_nothing_else() -> None:
    holder = Holder()
    snapshot, tensor = Snapshot(holder), holder.tensor
    holder.tensor += 1
    holder.count, holder.held[0], holder.by_name["b"] = 7, [9, 9], torch.ones(2)
    holder.by_name["a"] += 5
    holder.held[1].append(3)
    holder.kernel.append(2)
    holder.again = torch.ones(5)
    vars(holder)["new"] = 1
    snapshot.put_back()
    assert holder.tensor is tensor is holder.again and not holder.tensor.any()
    assert (holder.count, holder.held, list(holder.by_name)) == (0, [[1], [2]], ["a"])
    assert holder.by_name["a"] == 1 and not hasattr(holder, "new")
    assert holder.kernel == [1, 2]  # what a plan names is left alone


def test_an_expanded_tensor_is_written_back_once() -> None:
    expanded = torch.arange(4).expand(2, 3, 4)
    assert without_repeats(expanded).shape == (1, 1, 4)
    assert without_repeats(torch.zeros(2, 3)).shape == (2, 3)
    assert without_repeats(torch.tensor(3)).shape == ()
