"""CaM: decode against loops, what two equal tokens become, bytes, and the draw of what is merged."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.decode import step
from kvbench.cache.merge import Evicted, merged_rows
from kvbench.cache.rule import EMPTY
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.cam import CaM
from kvbench.methods.per_token import PerToken
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared import slow_llama as slow
from tests.shared.families import exact_llama, random_ids
from tests.shared.side_by_side import side_by_side

SCHEDULE = [*[1] * 8, 4, *[1] * 8]
START = 50


def uniform(seed: int, layer: int, head: int, position: int) -> float:
    """The hash that random eviction draws by, in [0, 1)."""

    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return (x ^ x >> 16) % 2**31

    return mix(mix(mix(mix(position) ^ head) ^ layer) ^ seed) / 2**31


@dataclass
class CaMHistory(slow.EvictingHistory):
    """Each evicted value goes to the next `recipients` kept ones, or to none."""

    recipients: int = 32
    mean: bool = False
    seed: int = 0

    def merge(self, b: int, h: int, gone: list[int], stay: list[int]) -> None:
        if self.seen == START and not self.mean:
            return
        values = self.value.clone()
        added = {p: torch.zeros(values.shape[-1], dtype=values.dtype) for p in stay}
        weights = dict.fromkeys(stay, 0.0)
        for position in gone:
            following = [p for p in stay if p > position][: self.recipients]
            mean = sum(float(self.scores[b, h, p]) for p in following) / len(following)
            if uniform(self.seed, self.layer, h, position) < min(1, float(self.scores[b, h, position]) / mean):
                for p in following:
                    added[p] += values[b, h, position] / len(following)
                    weights[p] += 1 / len(following)
        for p in stay:
            if weights[p]:
                scale = 1 + weights[p] if self.mean else 1
                merged = (values[b, h, p] + added[p]) / scale
                self.value[b, h, p] = self.as_stored(merged[None, None, None])[0, 0, 0]


CASES: dict[str, tuple[CaM, Store, dict[str, object]]] = {
    "sum": (CaM(24), DenseStore(), {}),
    "sum, few": (CaM(24, recipients=3, seed=5), DenseStore(), {"recipients": 3, "seed": 5}),
    "mean": (CaM(24, merge_by="mean", recipients=5), DenseStore(), {"mean": True, "recipients": 5}),
    "sum+int8": (CaM(24), PerToken(8, 8, 8), {"bits": 8, "group": 8}),
    "filling": (CaM(START + 4, merge_by="mean"), DenseStore(), {"mean": True, "budget": START + 4}),
    "smallest": (CaM(5, merge_by="mean"), DenseStore(), {"mean": True, "budget": 5}),
}


@pytest.mark.parametrize("name", CASES)
def test_against_loops(name: str) -> None:
    """Logits and kept positions after every forward, of two rows; the keys are never changed."""
    rule, store, settings = CASES[name]
    model = exact_llama(6, 3)
    reference = slow.SlowLlama(model)
    ids = random_ids(2, START + sum(SCHEDULE))
    cache = build_cache(model, Method("cam", rule, store), ids[:, :START], sum(SCHEDULE), max_step=4)
    common = {"keeps": slow.streaming_keeps(4), "budget": 24, "combine": "sum"}
    histories = reference.histories(CaMHistory, **(common | settings))
    reference(ids[:, :START], histories)
    for layer, history in side_by_side(model, cache, histories, ids, SCHEDULE, atol=1e-7):
        assert layer.kept_positions().tolist() == history.kept()


def evicted(scores: Tensor, position: Tensor, victim: int) -> Evicted:
    rows = torch.arange(position.numel(), dtype=torch.float32).view(1, 1, -1, 1).expand(1, 1, -1, 4)
    slot = (position == victim).nonzero()[:, 0].view(1, 1, 1)
    stays = (position != victim) & (position != EMPTY)
    shaped = (x.view(1, 1, -1) for x in (position, stays, scores))
    return Evicted(rows, rows, *shaped, slot, 0, torch.empty(1, 1, 0))


def test_the_share_that_is_merged_is_the_ratio_of_attention() -> None:
    """2,000 seeds: a token with 0.3 of its followers' mean attention is merged in 30% of them, one above 1 always."""
    position = torch.tensor([7, 3, 9, 0, EMPTY, 8])
    for own, expected in ((0.3, 0.3), (1.5, 1.0), (0.0, 0.0)):
        scores = torch.tensor([1.0, own, 0.5, 9.0, 9.0, 1.5])
        drawn = [CaM(8, recipients=3, seed=seed).merge(evicted(scores, position, 3)) for seed in range(2000)]
        merged = sum(bool((merge.weight > 0).any()) for merge in drawn) / 2000
        assert merged == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 2000) ** 0.5)
        assert drawn[0].into.flatten().tolist() == [0, 5, 2]  # the slots of positions 7, 8 and 9


def test_batch_rows_draw_alike() -> None:
    """A row is merged in a batch as alone."""
    model, ids = exact_llama(4, 2), random_ids(2, 60)
    method = Method("cam", CaM(16, recipients=4), DenseStore())
    both = build_cache(model, method, ids[:, :40], 20)
    alone = build_cache(model, method, ids[1:, :40], 20)
    for at in range(40, 60):
        together, single = step(model, ids[:, [at]], both), step(model, ids[1:, [at]], alone)
        torch.testing.assert_close(together[1:], single, atol=1e-12, rtol=0)


def test_merging_two_equal_tokens_changes_nothing() -> None:
    """With "mean" no value changes by a bit. With "sum" the sum of values times exp(score) is that of both tokens."""
    position, scores = torch.arange(6), torch.full((6,), 2.0)
    value = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    value[..., 3, :] = value[..., 2, :]
    one = evicted(scores, position, 2)

    for merge_by in ("sum", "mean"):
        merge = CaM(8, recipients=1, merge_by=merge_by).merge(one)
        assert merge.into.flatten().tolist() == [3] and merge.weight.flatten().tolist() == [1.0]
        after = merged_rows(value, one.victims, merge)
        if merge_by == "mean":
            assert torch.equal(after, value)
        else:  # equal keys: equal exp(score), here 1
            torch.testing.assert_close(after[0, 0, 3], value[0, 0, 2] + value[0, 0, 3], atol=0, rtol=0)


def test_bytes_are_those_of_streaming_and_the_scores() -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 60)
    without = StreamingLLM(24, variant="absolute")
    ours, theirs = (
        held_bytes(build_cache(model, Method("m", rule, DenseStore()), ids, 8).buffers()).parts
        for rule in (CaM(24), without)
    )
    assert ours.pop("scores") == 4 * 2 * 2 * 25  # float32, layers, heads, slots
    assert ours == theirs


@pytest.mark.parametrize("name", ["cam", "d2o"])
def test_a_prompt_that_fits_changes_nothing(name: str) -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 40)
    cache = build_cache(model, load_method(name, budget=40), ids[:, :30], 10)
    full = build_cache(model, load_method("full"), ids[:, :30], 10)
    for at in range(30, 40):
        torch.testing.assert_close(step(model, ids[:, [at]], cache), step(model, ids[:, [at]], full), atol=0, rtol=0)
    assert not cache.has_compressed


@pytest.mark.parametrize("name", ["cam", "d2o"])
@pytest.mark.parametrize("store", ["fp8", "turbo4", "paged", "kivi4"])
def test_stores_that_cannot_be_read_slot_by_slot_are_refused(name: str, store: str) -> None:
    with pytest.raises(UserError, match=f"method={name}.* merges tokens"):
        load_method(f"{name}+{store}", budget=60)
