"""DuoAttention: decode against loops, bytes by the share of heads, and calibration that finds a planted head."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.api import load_method
from kvbench.cache import calibrate as calibrate_module
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.calibrate import calibrate, calibration_ids
from kvbench.cache.counters import CacheFull
from kvbench.cache.decode import step
from kvbench.cache.pool import BLOCK_SIZE
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.retrieval import passkey_prompts, retrieval_by_head
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.adakv import AdaKV
from kvbench.methods.duo import Duo
from kvbench.methods.per_token import PerToken
from tests.shared import slow_llama as slow
from tests.shared.families import exact_llama, random_ids
from tests.shared.models import random_llama
from tests.shared.side_by_side import side_by_side
from tests.shared.text import character_tokenizer, loaded

RETRIEVAL = {0: torch.tensor([0.1, 0.7, 0.3]), 1: torch.tensor([0.5, 0.2, 0.7])}
N_SINK, WINDOW = 3, 8


def slow_counts(prompt: int, budget: int) -> dict[tuple[int, int], int]:
    """Tokens that each (layer, head) keeps of the prompt, from the docstring's words."""
    numbers = {(layer, head): float(x) for layer, row in RETRIEVAL.items() for head, x in enumerate(row)}
    best = sorted(numbers, key=lambda place: (-numbers[place], place))
    fixed = N_SINK + WINDOW
    n_whole = math.floor(len(best) * (budget - fixed) / (prompt - fixed))
    left = len(best) * budget - n_whole * prompt
    counts = dict.fromkeys(best[:n_whole], prompt)
    for place in best[n_whole:]:
        counts[place] = left // (len(best) - n_whole)
    for place in best[n_whole : n_whole + left % (len(best) - n_whole)]:
        counts[place] += 1
    return counts


@dataclass
class DuoHistory(slow.History):
    """Streaming heads see sinks and their newest tokens, retrieval heads everything."""

    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    prompt: int = 0
    holds: bool = True
    bits: int = 0

    def as_stored(self, rows: Tensor) -> Tensor:
        return slow.along_channels(rows, self.bits, 8) if self.bits else rows

    def after(self, probabilities: Tensor) -> None:
        assert self.alive is not None
        if self.seen > self.prompt and not self.holds:
            return
        for head in range(self.alive.shape[1]):
            count = self.counts[self.layer, head]
            if count < self.prompt:
                self.alive[:, head, N_SINK : self.seen - (count - N_SINK)] = False


SCHEDULE = [*[1] * 6, 4, *[1] * 6]


@pytest.mark.parametrize(
    ("budget", "decode", "store", "bits"),
    [
        (11, "evict", DenseStore(), 0),
        (24, "evict", PerToken(8, 8, 8), 8),
        (40, "evict", DenseStore(), 0),
        (69, "evict", DenseStore(), 0),
        (40, "append", DenseStore(), 0),
    ],
)
def test_against_loops(budget: int, decode: str, store: Store, bits: int) -> None:
    model = exact_llama(6, 3)
    reference = slow.SlowLlama(model)
    ids = random_ids(2, 70 + sum(SCHEDULE))
    rule = Duo(budget, decode, n_sink=N_SINK, window=WINDOW, retrieval=RETRIEVAL)  # type: ignore[arg-type]
    cache = build_cache(model, Method("duo", rule, store), ids[:, :70], sum(SCHEDULE), max_step=4)
    counts = slow_counts(70, budget)
    histories = reference.histories(DuoHistory, counts=counts, prompt=70, holds=decode == "evict", bits=bits)
    reference(ids[:, :70], histories)
    assert isinstance(cache, KVCache) and cache.kept_tokens == pytest.approx(budget)
    for layer, history in side_by_side(model, cache, histories, ids, [0, *SCHEDULE], atol=1e-8):
        assert isinstance(layer, RaggedLayer)
        kept = [[[p for p in head if p >= 0] for head in row] for row in layer.kept_positions().tolist()]
        assert kept == history.kept()
        assert layer.kept == pytest.approx(sum(len(head) for row in kept for head in row) / 6)
    if any(count == 70 for count in counts.values()) or decode == "append":
        with pytest.raises(CacheFull):
            step(model, random_ids(2, 1), cache)


def test_a_prompt_that_fits_is_kept_whole_and_grows() -> None:
    model, ids = exact_llama(6, 3), random_ids(1, 50)
    rule = Duo(40, n_sink=N_SINK, window=WINDOW, retrieval=RETRIEVAL)
    cache = build_cache(model, Method("duo", rule, DenseStore()), ids[:, :40], 10)
    full = build_cache(model, load_method("full"), ids[:, :40], 10)
    for at in range(40, 50):
        torch.testing.assert_close(step(model, ids[:, [at]], cache), step(model, ids[:, [at]], full), atol=0, rtol=0)
    assert cache.kept_tokens == 50


@pytest.mark.parametrize("budget", [60, 120, 200])
def test_held_bytes_follow_the_share_of_retrieval_heads(budget: int) -> None:
    """Retrieval heads hold prompt and new tokens, streaming heads their window, each in whole blocks."""
    model, ids = random_llama(6, 3, 64, dtype=torch.float32), random_ids(1, 300)
    rule = Duo(budget, n_sink=N_SINK, window=WINDOW, retrieval=RETRIEVAL)
    cache = build_cache(model, Method("duo", rule, DenseStore()), ids, max_new_tokens=20)
    counts = slow_counts(300, budget).values()
    blocks = sum(math.ceil((n + (20 if n == 300 else 1)) / BLOCK_SIZE) for n in counts)
    assert held_bytes(cache.buffers()).parts["dense"] == blocks * BLOCK_SIZE * 2 * 64 * 4
    assert sum(n == 300 for n in counts) == math.floor(6 * (budget - 11) / 289)


def planted(layer: int, head: int) -> torch.nn.Module:
    """A Llama of 2 layers and 3 KV heads of which one attends to earlier occurrences of the query's own token."""
    model = random_llama(6, 3, 32, dtype=torch.float32, vocab=97)
    model.model.rotary_emb.inv_freq.mul_(1e-4)  # so that matching keys do not depend on distance
    attention = model.model.layers[layer].self_attn
    turn = torch.linalg.qr(
        torch.randn(attention.k_proj.in_features, 32, generator=torch.Generator().manual_seed(1))
    ).Q.T
    with torch.no_grad():
        attention.k_proj.weight[32 * head : 32 * (head + 1)] = 3 * turn
        for query in (2 * head, 2 * head + 1):
            attention.q_proj.weight[32 * query : 32 * (query + 1)] = 3 * turn
    return model


@pytest.mark.parametrize(("layer", "head"), [(0, 2), (1, 0)])
def test_a_planted_retrieval_head_is_found(
    layer: int, head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the largest number by far, is the one that keeps the prompt, and is read back from the disk."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    model = loaded(planted(layer, head))
    method = Method("duo", Duo(0.3, n_sink=2, window=8), DenseStore())
    rule = calibrate(method, model).rule
    assert isinstance(rule, Duo)
    numbers = torch.stack([rule.retrieval[0], rule.retrieval[1]])
    others = numbers.flatten().sort(descending=True).values
    assert numbers[layer, head] == others[0] > 2 * others[1]
    cache = build_cache(model.model, Method("duo", rule, DenseStore()), random_ids(1, 100))
    assert isinstance(cache, KVCache)
    lengths = torch.stack([layer.lengths[0] for layer in cache.layers])  # type: ignore[union-attr]
    assert (lengths == 100).nonzero().tolist() == [[layer, head]]
    monkeypatch.setattr(calibrate_module, "retrieval_by_head", None)  # a second time nothing is computed
    again = calibrate(method, model).rule
    assert isinstance(again, Duo) and all(torch.equal(again.retrieval[i], rule.retrieval[i]) for i in (0, 1))


def test_prompts_hold_the_passkey_twice() -> None:
    for tokenizer in (None, character_tokenizer()):
        model = loaded(random_llama(2, 1, 16, vocab=97), tokenizer)
        filler = torch.arange(8 * 128).view(8, 128) % 97
        prompts = passkey_prompts(filler, tokenizer, model.vocab_size)
        assert prompts.ids.shape == filler.shape and prompts.length == 16
        for row, start in zip(prompts.ids, prompts.start, strict=True):
            assert torch.equal(row[start : start + 16], row[-16:]) and start + 16 <= 128 - 32
        assert len({tuple(row[-16:].tolist()) for row in prompts.ids}) == 8


def test_a_number_is_the_attention_from_the_second_passkey_to_the_first() -> None:
    """Against transformers' own attention matrices."""
    model = random_llama(4, 2, 16, dtype=torch.float32)
    prompts = passkey_prompts(torch.arange(3 * 128).view(3, 128) % 64, None, 64)
    found = retrieval_by_head(model, prompts)
    model.set_attn_implementation("eager")
    expected = torch.zeros(2, 2)
    for row, start in zip(prompts.ids, prompts.start, strict=True):
        for layer, seen in enumerate(model(input_ids=row[None], output_attentions=True).attentions):
            for head in range(4):
                for query in range(128 - 17, 127):
                    expected[layer, head // 2] += seen[0, head, query, start : start + 16].sum().item() / (16 * 3)
    torch.testing.assert_close(torch.stack([found[0], found[1]]), expected, atol=1e-5, rtol=0)


def test_prompts_come_from_the_calibration_text() -> None:
    model = loaded(random_llama(2, 1, 16))
    ids = calibration_ids(model)
    assert torch.equal(passkey_prompts(ids, None, model.vocab_size).ids[0, 32:64], ids[0, :32])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("method=duo", "needs a budget"),
        ("method=duo budget=79", "budget=79 is below the 80 tokens that Duo always keeps"),
        ("method=duo budget=100 window=0", "window=0"),
        ("method=duo budget=100 store=kivi4", "store=dense"),
    ],
)
def test_refusals(entry: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_method(entry)


def test_a_rule_that_is_not_calibrated_is_refused() -> None:
    with pytest.raises(UserError, match="not calibrated"):
        build_cache(exact_llama(6, 3), load_method("duo", budget=90), random_ids(1, 100))


def test_it_wraps_no_rule_and_is_wrapped_by_none() -> None:
    with pytest.raises(UserError, match="inner=snapkv"):
        AdaKV(100, inner=Duo(100))
