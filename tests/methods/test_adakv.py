"""AdaKV: shares and eviction against loops, memory against the exact sum over heads, the config's inner rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from hydra.errors import HydraException
from torch import Tensor

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.counters import CacheFull
from kvbench.cache.decode import step
from kvbench.cache.layer import SlotLayer
from kvbench.cache.pool import BLOCK_SIZE
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rule import KEEP, KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.per_token import PerToken
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared import slow_llama as slow
from tests.shared.families import exact_llama, random_ids
from tests.shared.models import random_llama
from tests.shared.side_by_side import side_by_side


def slow_shares(worth: list[list[float]], budget: int, floor: float) -> list[set[int]]:
    """Which positions stay in each head of a layer: worth[head][position]."""
    tokens = [sorted(((w, p, h) for p, w in enumerate(row)), reverse=True) for h, row in enumerate(worth)]
    own = math.floor(Fraction(str(floor)) * budget)
    stay = [{p for _, p, _ in row[:own]} for row in tokens]
    others = sorted((token for row in tokens for token in row[own:]), reverse=True)
    for _, position, head in others[: len(worth) * (budget - own)]:
        stay[head].add(position)
    return stay


@pytest.mark.parametrize("share", [0, 0.2, 0.35, 1])
@pytest.mark.parametrize("budget", [5, 15, 19])
def test_blended_shares_are_the_authors_up_to_rounding(budget: int, share: float) -> None:
    """Their head budget, round(count (1 - a) + floor(a (B - w))) + w, and ours, whose sum is exact, are one apart."""
    draw = torch.Generator().manual_seed(budget)
    rule = AdaKV(budget, inner=KNorm(budget), floor=share, allocation="blend")
    for _ in range(20):
        worth = torch.rand(2, 3, 40, generator=draw) * torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
        worth[:, :, -3:] = KEEP
        found = rule.head_tokens(worth, budget)
        assert (found.sum(-1) == 3 * budget).all()
        for b in range(2):
            others = sorted(((w, h) for h in range(3) for w in worth[b, h, :-3].tolist()), reverse=True)
            top = [head for _, head in others[: 3 * (budget - 3)]]
            for head in range(3):
                theirs = round(top.count(head) * (1 - share) + math.floor(share * (budget - 3))) + 3
                assert abs(int(found[b, head]) - theirs) <= 1


@pytest.mark.parametrize("floor", [0, 0.2, 0.35, 1])
@pytest.mark.parametrize("budget", [5, 15, 19])
def test_shares_of_the_heads(budget: int, floor: float) -> None:
    """Against loops, with ties, heads of very different worth, and tokens that must stay."""
    draw = torch.Generator().manual_seed(budget)
    rule = AdaKV(budget, inner=KNorm(budget), floor=floor)
    for _ in range(20):
        worth = torch.randint(0, 6, (2, 3, 20), generator=draw).float()
        worth[:, 1] -= 4
        worth[:, :, -3:] = KEEP
        shares = rule.head_tokens(worth, budget)
        for row, got in zip(worth.tolist(), shares.tolist(), strict=True):
            assert got == [len(stay) for stay in slow_shares(row, budget, floor)]
        assert (shares.sum(1) == 3 * budget).all() and (shares >= max(3, int(floor * budget))).all()


@dataclass
class AdaHistory(slow.EvictingHistory):
    """Shares by loops at the end of the prompt; then each head holds its own. A window of `recent` always stays."""

    recent: int = 0
    holds: bool = True
    shares: list[list[int]] = field(default_factory=list)
    target: int = 0

    def after(self, probabilities: Tensor) -> None:
        self.budget = 10**9
        super().after(probabilities)
        assert self.alive is not None
        worth = self.worth()
        worth[..., self.seen - self.recent :] = math.inf
        if not self.shares:
            for b, row in enumerate(worth.tolist()):
                stay = slow_shares(row, self.target, 0.2)
                self.shares.append([len(head) for head in stay])
                for h, kept in enumerate(stay):
                    self.alive[b, h] = torch.tensor([p in kept for p in range(self.seen)])
        elif self.holds:
            for b, row in enumerate(self.kept()):
                for h, positions in enumerate(row):
                    best = sorted(((float(worth[b, h, p]), p) for p in positions), reverse=True)
                    self.alive[b, h] = False
                    self.alive[b, h, [p for _, p in best[: self.shares[b][h]]]] = True

    def worth(self) -> Tensor:
        if self.scores is not None:
            return self.scores.clone()
        assert self.alive is not None
        tokens = [[float(p * 37 % 50 + 9 * h) for p in range(self.seen)] for h in range(self.alive.shape[1])]
        return torch.tensor([tokens] * self.alive.shape[0])


@dataclass(frozen=True)
class Drawn(KeepRule):
    """Worth by position, with ties, and more in later heads; no scores are kept."""

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        head = torch.arange(position.shape[1]).view(1, -1, 1)
        return torch.where(position == newest, KEEP, (position * 37 % 50 + 9 * head).double())


SCHEDULE = [*[1] * 20, 4, *[1] * 12]
H2O_CASE = {"combine": "sum", "recent": 12, "target": 24}
CASES: dict[str, tuple[KeepRule, Store, dict[str, object]]] = {
    "h2o": (AdaKV(24, inner=H2O(24)), DenseStore(), H2O_CASE),
    "h2o-int8": (AdaKV(24, inner=H2O(24)), PerToken(8, 8, 8), {**H2O_CASE, "bits": 8, "group": 8}),
    "drawn": (AdaKV(24, inner=Drawn(24)), DenseStore(), {"recent": 1, "target": 24}),
    "drawn-append": (
        AdaKV(24, inner=Drawn(24, decode="append")),
        PerToken(4, 4, 8),
        {"recent": 1, "target": 24, "holds": False, "bits": 4, "group": 8},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_loops(name: str) -> None:
    """Logits and kept positions of every row and head after every forward, single tokens and questions."""
    rule, store, settings = CASES[name]
    model = exact_llama(6, 3)
    reference = slow.SlowLlama(model)
    ids = random_ids(2, 70 + sum(SCHEDULE))
    cache = build_cache(model, Method(name, rule, store), ids[:, :70], sum(SCHEDULE), max_step=4)
    histories = reference.histories(AdaHistory, **settings)
    reference(ids[:, :70], histories)
    for layer, history in side_by_side(model, cache, histories, ids, [0, *SCHEDULE], atol=1e-8):
        assert isinstance(layer, RaggedLayer)
        kept = [[[p for p in head if p >= 0] for head in row] for row in layer.kept_positions().tolist()]
        assert kept == history.kept()
        assert len({len(head) for row in kept for head in row}) > 1, "no head differs from another"
    with pytest.raises(CacheFull):
        step(model, random_ids(2, 5), cache)
    if not rule.holds_budget:
        with pytest.raises(CacheFull, match="larger max_new_tokens"):
            step(model, random_ids(2, 1), cache)


@pytest.mark.parametrize("store", ["rot4", "rot3", "turbo4", "turbo3", "fp8", "bf16"])
def test_the_compiled_kernel_agrees(store: str) -> None:
    """On every kind of store, and the tokens that both keep are the same."""
    model, ids = random_llama(6, 3, 32, dtype=torch.float32), random_ids(2, 112)
    method = load_method(f"adakv+{store}", budget=40, window=8, decode="evict")
    caches = [build_cache(model, method, ids[:, :100], 12, kernel=kernel) for kernel in ("cpu", "reference")]
    for at in range(100, 112):
        one, other = (step(model, ids[:, at : at + 1], cache) for cache in caches)
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)
    assert [cache.kernel_name for cache in caches] == ["cpu-c++", "reference"]
    for layers in zip(*(cache.layers for cache in caches), strict=True):  # type: ignore[union-attr]
        assert torch.equal(*(layer.kept_positions() for layer in layers))


@pytest.mark.parametrize("decode", ["append", "evict"])
@pytest.mark.parametrize("bits", [0, 2])
def test_memory_follows_the_heads(decode: str, bits: int) -> None:
    """Bytes of unique storages are those of the sum over heads, each rounded up to whole blocks: never a rectangle."""
    model = random_llama(6, 3, 64, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight[:64] *= 0.9  # smaller keys: this head's tokens are worth more
    store = PerToken(bits, bits, 32) if bits else DenseStore()
    rule = AdaKV(64, inner=KNorm(64, decode=decode))
    cache = build_cache(model, Method("adakv", rule, store), random_ids(2, 300), max_new_tokens=20)
    assert isinstance(cache, KVCache)
    room = 20 if decode == "append" else 1
    a_token = 2 * (64 * 4 if not bits else 64 * bits // 8 + 2 * 4)
    tokens = blocks = rectangle = 0
    for layer in cache.layers:
        assert isinstance(layer, RaggedLayer)
        counts = [len([p for p in head if p >= 0]) for row in layer.kept_positions().tolist() for head in row]
        assert sum(counts) == 64 * len(counts)
        tokens += sum(n + room for n in counts)
        blocks += sum(math.ceil((n + room) / BLOCK_SIZE) for n in counts)
        rectangle += (max(counts) + room) * len(counts)
    parts = held_bytes(cache.buffers()).parts
    rows = sum(parts[part] for part in ("dense", "codes", "scales") if part in parts)
    assert rows == blocks * BLOCK_SIZE * a_token
    assert rows < (tokens + BLOCK_SIZE * 2 * 3 * 2) * a_token and tokens + BLOCK_SIZE * 12 < rectangle
    metadata = parts["positions"] + parts.get("scores", 0)
    per_row = 4 + (4 if decode == "evict" else 0)
    tables = sum(layer.table.nbytes + layer.lengths.nbytes + layer.free.nbytes for layer in cache.layers)
    assert metadata == blocks * BLOCK_SIZE * per_row + tables


def test_pyramid_inside() -> None:
    """Layers have Pyramid's budgets, and move them between their heads."""
    model, ids = exact_llama(4, 2, layers=4), random_ids(1, 200)
    inner = Pyramid(40, window=8)
    cache = build_cache(model, Method("adakv", AdaKV(40, inner=inner), DenseStore()), ids, 4)
    assert isinstance(cache, KVCache)
    assert [layer.kept for layer in cache.layers] == [inner.layer_tokens(200, i, 4) for i in range(4)]
    assert any(len(set(layer.lengths.flatten().tolist())) > 1 for layer in cache.layers)  # type: ignore[union-attr]


def test_a_prompt_that_fits_leaves_heads_even() -> None:
    model, ids = exact_llama(4, 2), random_ids(1, 60)
    cache = build_cache(model, Method("adakv", AdaKV(40, inner=KNorm(40)), DenseStore()), ids[:, :30], 30)
    for at in range(30, 60):
        step(model, ids[:, at : at + 1], cache)
    assert isinstance(cache, KVCache) and all(isinstance(layer, SlotLayer) for layer in cache.layers)
    assert cache.kept_tokens == 40


def test_named_by_the_config() -> None:
    assert load_method("adakv", budget=50).rule == AdaKV(50, inner=SnapKV(50))
    rule = load_method("adakv", budget=50, inner="h2o", window=9).rule
    assert rule == AdaKV(50, inner=H2O(50, recent=9))
    assert load_method("method=adakv inner=pyramid budget=0.5 decode=evict store=rot4").rule.holds_budget


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("method=adakv", "needs a budget"),
        ("method=adakv budget=20", "below the 33 tokens that SnapKV always keeps"),
        ("method=adakv budget=50 inner=full", "inner=snapkv"),
        ("method=adakv budget=50 inner=kivi4", "no plain keep rule"),
        ("method=adakv budget=50 inner=adakv", "no plain keep rule"),
        ("method=adakv budget=50 inner=streaming_llm", "variant=absolute"),
        ("method=adakv budget=50 store=kivi4", "store=dense"),
        ("method=adakv budget=50 inner=keydiff decode=evict", "heads of different lengths.*type decode=append"),
        ("method=adakv budget=50 inner=r_kv", "heads of different lengths.*type decode=append"),
    ],
)
def test_refusals(entry: str, says: str) -> None:
    with pytest.raises((UserError, HydraException), match=says):
        load_method(entry)


def test_wraps_only_rules_with_its_own_budget() -> None:
    for inner in (Full(), KNorm(30)):
        with pytest.raises(UserError, match="takes none|another"):
            AdaKV(20, inner=inner)
    with pytest.raises(UserError, match="floor=1.5"):
        AdaKV(20, inner=KNorm(20), floor=1.5)
    assert AdaKV(20, inner=StreamingLLM(20, variant="absolute")).holds_budget
    with pytest.raises(UserError, match="blocks of a pool"):
        Method("adakv", AdaKV(20, inner=KNorm(20)), Kivi()).check_combination()
