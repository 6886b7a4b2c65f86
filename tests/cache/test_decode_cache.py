"""What every kind of cache answers alike."""

from __future__ import annotations

import copy

import pytest
import torch

from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.forward import forward
from kvbench.cache.rule import EMPTY, KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.recompute import Recompute
from kvbench.methods.snapkv import SnapKV
from tests.shared.families import exact_llama, random_ids

pytestmark = pytest.mark.engine

MODEL, IDS = exact_llama(4, 2), random_ids(2, 60)
RULES: dict[str, KeepRule] = {
    "full": Full(),
    "h2o": H2O(budget=16),
    "adakv": AdaKV(budget=16, inner=SnapKV(budget=16, window=8)),
    "recompute": Recompute(),
}


def cache_of(name: str) -> DecodeCache:
    return build_cache(MODEL, Method(name, RULES[name], DenseStore()), IDS[:, :40], 20, max_step=20)


@pytest.mark.parametrize("name", RULES)
def test_copy_deepcopy_is_refused_in_one_line(name: str) -> None:
    cache = cache_of(name)
    with pytest.raises(
        UserError, match=r"cannot be copied.*build another: build_cache\(model, method, record\)"
    ) as error:
        copy.deepcopy(cache)
    assert "\n" not in str(error.value)
    assert cache.step(MODEL, IDS[:, 40:41]).shape[:2] == (2, 1)


@pytest.mark.parametrize("name", RULES)
def test_predictions_are_those_of_single_steps(name: str) -> None:
    """Seven targets: the first from the prompt's last logits, the others after the target before them."""
    cache, targets = cache_of(name), IDS[:, 40:47]
    want = [cache.last_logits, *(cache.step(MODEL, targets[:, t : t + 1])[:, -1] for t in range(6))]
    found = list(cache_of(name).predictions(MODEL, targets, 1))
    assert len(found) == 7
    for (logits, _), other in zip(found, want, strict=True):
        torch.testing.assert_close(logits, other, atol=1e-6, rtol=1e-5)
    assert [engaged for _, engaged in found] == [False, *([name in ("h2o", "adakv")] * 6)]


@pytest.mark.parametrize("name", RULES)
def test_counts_after_two_steps(name: str) -> None:
    cache = cache_of(name)
    for at in (40, 41):
        cache.step(MODEL, IDS[:, at : at + 1])
    assert (cache.seen, cache.prompt_tokens) == (42, 40)
    assert cache.recomputes == (name == "recompute")
    assert cache.positions_processed == (40 + 41 + 42 if cache.recomputes else 42)
    held = cache.kept_positions()
    assert list(held) == ([] if cache.recomputes else [0, 1])
    for position in held.values():
        assert (position != EMPTY).double().sum(-1).mean() == cache.kept_tokens


def test_recompute_takes_a_step_of_several_tokens() -> None:
    cache = cache_of("recompute")
    got = cache.step(MODEL, IDS[:, 40:44], logits_to_keep=0)
    want = forward(MODEL, IDS[:, :44], None, 4)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    with pytest.raises(UserError, match="1 rows and the cache 2"):
        cache.step(MODEL, IDS[:1, 44:45])
