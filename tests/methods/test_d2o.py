"""D2O: decode against loops, what two equal tokens become, the threshold, and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.layer import SlotLayer
from kvbench.cache.merge import Evicted, merged_rows
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.d2o import D2O
from kvbench.methods.h2o import H2O
from kvbench.methods.per_token import PerToken
from tests.shared import slow_llama as slow
from tests.shared.families import exact_llama, random_ids
from tests.shared.side_by_side import side_by_side

SCHEDULE = [*[1] * 8, 4, *[1] * 8]
START, N_SINK = 50, 4


def h2o_with_sinks(
    layer: int, head: int, positions: list[int], scores: list[float], seen: int, budget: int
) -> set[int]:
    last = max(1, (budget - N_SINK) // 2)
    fixed = {p for p in positions if p < N_SINK or p >= seen - last}
    others = sorted(((s, p) for s, p in zip(scores, positions, strict=True) if p not in fixed), reverse=True)
    return fixed | {p for _, p in others[: budget - len(fixed)]}


@dataclass
class D2OHistory(slow.EvictingHistory):
    """Each evicted token goes to the most similar kept key, where it is similar enough."""

    ema: float = 0.5
    threshold: dict[tuple[int, int], float] = field(default_factory=dict)
    merged: int = 0
    dropped: int = 0

    def merge(self, b: int, h: int, gone: list[int], stay: list[int]) -> None:
        keys, values = self.key[b, h].clone(), self.value[b, h].clone()
        nearest = {}
        for p in gone:
            similar = {j: float(keys[p] @ keys[j] / keys[p].norm() / keys[j].norm()) for j in stay}
            best = max(stay, key=lambda j, similar=similar: similar[j])
            nearest[p] = best, similar[best]
        mean = sum(u for _, u in nearest.values()) / len(gone)
        before = self.threshold.get((b, h))
        now = mean if before is None else (1 - self.ema) * before + self.ema * mean
        self.threshold[b, h] = now
        for j in stay:
            here = [(p, math.exp(u)) for p, (best, u) in nearest.items() if best == j and u >= now - 1e-7]
            total = math.e + sum(w for _, w in here)
            for rows, old in ((self.key, keys), (self.value, values)):
                new = (math.e * old[j] + sum(w * old[p] for p, w in here)) / total
                rows[b, h, j] = self.as_stored(new[None, None, None])[0, 0, 0] if here else old[j]
            self.merged += len(here)
        self.dropped += sum(u < now - 1e-7 for _, u in nearest.values())


CASES: dict[str, tuple[D2O, Store, dict[str, object]]] = {
    "dense": (D2O(24), DenseStore(), {"budget": 24}),
    "slow threshold": (D2O(30, ema=0.1), DenseStore(), {"budget": 30, "ema": 0.1}),
    "filling": (D2O(START + 4), DenseStore(), {"budget": START + 4}),
    "filling+int8": (D2O(START + 4), PerToken(8, 8, 8), {"budget": START + 4, "bits": 8, "group": 8}),
    "smallest": (D2O(6), DenseStore(), {"budget": 6}),
}


@pytest.mark.parametrize("name", CASES)
def test_against_loops(name: str) -> None:
    """Logits, kept positions and thresholds after every forward, of two rows."""
    rule, store, settings = CASES[name]
    model = exact_llama(6, 3)
    reference = slow.SlowLlama(model)
    ids = random_ids(2, START + sum(SCHEDULE))
    cache = build_cache(model, Method("d2o", rule, store), ids[:, :START], sum(SCHEDULE), max_step=4)
    histories = reference.histories(D2OHistory, keeps=h2o_with_sinks, combine="sum", **settings)
    reference(ids[:, :START], histories)
    for layer, history in side_by_side(model, cache, histories, ids, SCHEDULE, atol=1e-7):
        assert isinstance(layer, SlotLayer) and layer.carried is not None
        assert layer.kept_positions().tolist() == history.kept()
        for (b, h), threshold in history.threshold.items():
            assert float(layer.carried[b, h]) == pytest.approx(threshold, abs=1e-6)
    assert all(history.merged and history.dropped for history in histories)


def evicted(key: Tensor, victims: list[int]) -> Evicted:
    slots = torch.tensor(victims).view(1, 1, -1)
    position = torch.arange(key.shape[2]).view(1, 1, -1)
    stays = torch.ones_like(position, dtype=torch.bool).scatter(-1, slots, False)
    return Evicted(key, key, position, stays, None, slots, 0, torch.full((1, 1, 1), torch.nan))


def test_merging_equal_tokens_changes_nothing() -> None:
    """Not a bit of any row, with one and with two tokens equal to a kept one."""
    key = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    key[..., 2, :] = key[..., 5, :] = key[..., 6, :]
    for victims in ([2], [2, 5]):
        one = evicted(key, victims)
        merge = D2O(8).merge(one)
        assert set(merge.into.flatten().tolist()) <= {5, 6} - set(victims) and (merge.weight > 0).all()
        assert torch.equal(merged_rows(key, one.victims, merge), key)


def test_bytes_are_those_of_h2o_and_a_threshold_for_each_head() -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 60)
    ours, theirs = (
        held_bytes(build_cache(model, Method("m", rule, DenseStore()), ids, 8).buffers()).held
        for rule in (D2O(24), H2O(24))
    )
    assert ours - theirs == 4 * 2 * 2


def test_a_prompt_cut_alone_carries_nothing() -> None:
    cache = build_cache(exact_llama(4, 2), Method("m", D2O(24, decode="append"), DenseStore()), random_ids(1, 60), 8)
    assert all(layer.carried is None for layer in cache.layers)


@pytest.mark.parametrize("ema", [-0.1, 1.5, "half"])
def test_an_ema_that_is_no_share_is_refused(ema: object) -> None:
    with pytest.raises(UserError, match="type a share from 0 to 1"):
        load_method(f"method=d2o budget=40 ema={ema}")
