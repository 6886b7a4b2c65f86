"""The other protocols against masked forwards; the same rows whatever the order of methods and samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.decode import step
from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.paged import PagedStore
from kvbench.cache.stock import StockStore
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.measures.perplexity import Perplexity, check_stream
from kvbench.measures.perplexity import windows as measured
from kvbench.measures.perplexity.windows import score_windows
from kvbench.methods.fp8 import Fp8
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.per_token import PerToken
from kvbench.methods.r_kv import RKV
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.models import random_llama
from tests.shared.scoring import CONTEXT, MODEL, TEXT, bench, plain_nll, settings
from tests.shared.text import methods, rows_of, run_context_of, value

SMALL = ("h2o", "kivi", "random", "streaming_llm")


@dataclass(frozen=True)
class Observing(Random):
    """Holds its budget, and looks at a prompt that it cannot do without."""

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(4),)


def stream_by_hand(method: Method, ids: Tensor) -> np.ndarray:
    """Log-probabilities [T, V] of ids[1:], every cache built anew by feeding all tokens before, one at a time."""
    record = prefill(MODEL, ids[None, :1], [method.rule])
    cache = build_cache(MODEL, method, record, max_new_tokens=len(ids))
    logits = [cache.last_logits] + [step(MODEL, ids[None, t : t + 1], cache)[:, -1] for t in range(1, len(ids) - 1)]
    return special.log_softmax(torch.cat(logits).double().numpy(), axis=-1)


def test_a_stream_of_the_full_cache_is_a_plain_forward() -> None:
    rows = rows_of(score_windows(bench(methods("full")), settings(tokens=150, protocol="stream")))
    expected = plain_nll(MODEL, TEXT[:151], 1)
    assert value(rows, "full", "nll") == pytest.approx(expected.mean(), abs=1e-4)
    (row,) = (row for row in rows if row.metric == "nll")
    assert (row.protocol, row.context, row.n) == ("stream", 0, 150)
    assert row.note is not None and "an empty cache + 150 tokens" in row.note
    curve = [row for row in rows if row.metric == "nll_at"]
    assert [row.position for row in curve] == [1, 39, 77, 115]
    means = [expected[start : start + 38].mean() for start in (0, 38, 76, 114)]
    assert [row.value for row in curve] == pytest.approx(means, abs=1e-4)


def test_a_stream_through_sinks_and_a_window_is_attention_under_their_mask() -> None:
    """Absolute positions: every token sees the sinks and the newest, nothing else, and so does one masked forward."""
    sinks, budget, length = 4, 12, 90
    rule = StreamingLLM(budget, n_sink=sinks, variant="absolute")
    named = methods("full") | {"sinks": Method("sinks", rule, DenseStore())}
    rows = rows_of(score_windows(bench(named), settings(tokens=length, protocol="stream")))
    # A query sees what was kept before it (the budget) and itself.
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (column <= row) & ((column < sinks) | (column > row - 1 - (budget - sinks)))
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    model = random_llama(4, 2, 16, dtype=torch.float32)  # the same weights, attending as transformers does
    logits = model(input_ids=TEXT[None, :length], attention_mask=mask, use_cache=False).logits[0].double().numpy()
    expected = -special.log_softmax(logits, axis=-1)[np.arange(length), TEXT[1 : length + 1].numpy()]
    assert value(rows, "sinks", "nll") == pytest.approx(expected.mean(), abs=1e-4)
    assert value(rows, "sinks", "kept_tokens") == budget
    assert value(rows, "sinks", "kl") > 1e-3


def test_a_stream_in_pieces_compares_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    named = methods("full", "h2o", "kivi", "streaming_llm")
    monkeypatch.setattr(measured, "PIECE", 7)
    rows = rows_of(score_windows(bench(named), settings(tokens=60, windows=2, protocol="stream")))
    full = np.stack([stream_by_hand(named["full"], TEXT[o : o + 61]) for o in (0, len(TEXT) - 61)])
    for name in ("h2o", "kivi", "streaming_llm"):
        other = np.stack([stream_by_hand(named[name], TEXT[o : o + 61]) for o in (0, len(TEXT) - 61)])
        kl = np.sum(np.exp(full) * (full - other), axis=-1)
        assert value(rows, name, "kl") == pytest.approx(kl.mean(), rel=1e-3)
        assert value(rows, name, "top1") == np.mean(full.argmax(-1) == other.argmax(-1))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Recompute(), "whole prefix at every step"),
        (H2O(0.5), "share of the prompt"),
        (SnapKV(40), "type decode=evict"),
        (dataclasses.replace(Observing(12), seed=1), "observes of a prompt"),
    ],
)
def test_what_needs_a_prompt_is_refused_by_name(rule: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"{reason}.*") as refused:
        check_stream(Method("some", rule, DenseStore()))
    assert "some" in str(refused.value) or "budget=0.5" in str(refused.value)


@pytest.mark.parametrize(
    "of", [Fp8, lambda: PagedStore(Fp8()), lambda: StockStore("fp8")], ids=["fp8", "paged", "stock"]
)
def test_a_scale_fixed_by_a_prompt_of_one_token_is_refused(of: Callable[[], Store]) -> None:
    """It would cut off all that follows: a KL of 0.4 was seen where there is 0.01 after a prompt."""
    try:
        store = of()
    except UserError as error:  # an older transformers has no such cache
        pytest.skip(str(error))
    with pytest.raises(UserError, match="takes its scale from the prompt and a stream has none"):
        check_stream(Method("some", Full(), store))
    check_stream(Method("some", Full(), PagedStore(PerToken())))


@pytest.mark.parametrize("name", SMALL)
def test_what_holds_its_budget_may_stream(name: str) -> None:
    check_stream(methods(name)[name])
    check_stream(Method("snapkv", SnapKV(40, decode="evict"), DenseStore()))
    check_stream(Method("r_kv", RKV(40), DenseStore()))  # it scores by queries of the moment, not of a prompt


@pytest.mark.slow
def test_twenty_thousand_tokens_in_constant_memory() -> None:
    length = 20_000
    model = random_llama(2, 1, 16, layers=1, dtype=torch.float32)
    text = torch.randint(97, (length + 1,), generator=torch.Generator().manual_seed(2))
    here = run_context_of(model, {"sinks": Method("sinks", StreamingLLM(64), DenseStore())}, text)
    rows = rows_of(score_windows(here, settings(tokens=length, protocol="stream")))
    short = rows_of(score_windows(here, settings(tokens=200, protocol="stream")))
    assert value(rows, "sinks", "held_bytes") == value(short, "sinks", "held_bytes")
    assert value(rows, "sinks", "kept_tokens") == 64
    assert value(rows, "sinks", "positions_processed") == length
    assert np.isfinite(value(rows, "sinks", "nll"))


def test_chunks_of_one_are_the_default() -> None:
    named = methods("full", "h2o", "kivi", "random", "recompute")
    one = rows_of(score_windows(bench(named), settings(windows=2, protocol="chunked", chunk=1)))
    plain = rows_of(score_windows(bench(named), settings(windows=2)))
    assert [dataclasses.replace(row, protocol=None, note=None) for row in one] == [
        dataclasses.replace(row, protocol=None, note=None) for row in plain
    ]


def test_chunks_are_masked_attention_over_what_was_kept_before_each() -> None:
    """A budget of sinks and a window, in blocks: a token sees what stood at the start of its block, and the block."""
    sinks, budget, chunk, tokens = 2, 10, 4, 11
    rule = StreamingLLM(budget, n_sink=sinks, variant="absolute")
    named = methods("full") | {"sinks": Method("sinks", rule, DenseStore())}
    rows = rows_of(score_windows(bench(named), settings(tokens=tokens, protocol="chunked", chunk=chunk)))
    length = CONTEXT + tokens - 1
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for t in range(CONTEXT, length):
        first = CONTEXT + (t - CONTEXT) // chunk * chunk
        seen[t, sinks : first - (budget - sinks)] = False
    model = random_llama(4, 2, 16, dtype=torch.float32)
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    logits = model(input_ids=TEXT[None, :length], attention_mask=mask, use_cache=False).logits[0].double().numpy()
    log_p = special.log_softmax(logits[CONTEXT - 1 :], axis=-1)
    expected = -log_p[np.arange(tokens), TEXT[CONTEXT : CONTEXT + tokens].numpy()]
    assert value(rows, "sinks", "nll") == pytest.approx(expected.mean(), abs=1e-4)
    (row,) = (row for row in rows if row.method == "sinks" and row.metric == "nll")
    assert row.protocol == "chunked4" and row.note is not None and "approximate: blocks of 4 tokens" in row.note
    full = rows_of(score_windows(bench(methods("full")), settings(tokens=tokens)))
    assert value(rows, "full", "nll") == pytest.approx(value(full, "full", "nll"), abs=1e-5)


# the order of things


def test_the_same_seed_gives_the_same_rows_bit_for_bit() -> None:
    named = methods("full", "h2o", "kivi", "random")
    once, again = (rows_of(score_windows(bench(named), settings(windows=3))) for _ in range(2))
    assert once == again


def test_the_order_of_methods_changes_nothing() -> None:
    rows = rows_of(score_windows(bench(methods("full", "h2o", "kivi", "random")), settings(windows=3)))
    turned = rows_of(score_windows(bench(methods("full", "random", "kivi", "h2o")), settings(windows=3)))
    assert {name: [r for r in turned if r.method == name] for name in ("full", "h2o", "kivi", "random")} == {
        name: [r for r in rows if r.method == name] for name in ("full", "h2o", "kivi", "random")
    }


def test_the_order_of_samples_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    named = methods("full", "h2o", "kivi")
    rows = rows_of(score_windows(bench(named), settings(windows=6, batch=2)))
    offsets = settings(windows=6).offsets([len(TEXT)])
    shuffled = [offsets[i] for i in (3, 0, 5, 4, 1, 2)]
    monkeypatch.setattr(Perplexity, "offsets", lambda *_: shuffled)
    turned = rows_of(score_windows(bench(named), settings(windows=6, batch=2)))
    assert [dataclasses.replace(row, stride=None) for row in turned] == [
        dataclasses.replace(row, stride=None) for row in rows
    ]
