"""Fidelity: greedy generation against whole-prefix forwards under a mask, and what is counted where texts end."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.cache.store import DenseStore
from kvbench.measures.context import RunContext
from kvbench.measures.fidelity import Fidelity
from kvbench.measures.fidelity import continuations as measured
from kvbench.measures.fidelity.continuations import continue_prompts, divergence
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.results.row import flags_of
from kvbench.texts.tokens import spread
from tests.shared.models import random_llama
from tests.shared.text import Breaks, methods, rows_of, run_context_of, value

CONTEXT, TOKENS = 40, 16
MODEL = random_llama(4, 2, 16, dtype=torch.float32)
TEXT = torch.randint(97, (1_000,), generator=torch.Generator().manual_seed(1))
SINKS, BUDGET = 4, 36


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a text unless a test says so."""
    monkeypatch.setattr(measured, "end_tokens", lambda bench: [])


def settings(**changes: Any) -> Fidelity:
    return dataclasses.replace(Fidelity(contexts=[CONTEXT], tokens=TOKENS, samples=5, batch=2), **changes)


def bench(named: dict[str, Method], **more: Any) -> RunContext:
    return run_context_of(MODEL, named, TEXT, **more)


def absolute() -> dict[str, Method]:
    return {"sinks": Method("sinks", StreamingLLM(BUDGET, n_sink=SINKS, variant="absolute"), DenseStore())}


def by_whole_prefixes(prompt: Tensor, budget: int | None) -> list[int]:
    """Greedy tokens, the whole text run again for each, a query after the prompt seeing sinks and window alone."""
    model = random_llama(4, 2, 16, dtype=torch.float32)
    ids = prompt
    while len(ids) < len(prompt) + TOKENS:
        n = len(ids)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        if budget is not None:
            for t in range(len(prompt), n):
                seen[t, SINKS : t - (budget - SINKS)] = False
        mask = torch.where(seen, 0.0, float("-inf"))[None, None]
        logits = model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().view(1)])
    return ids[len(prompt) :].tolist()


def test_divergence_by_whole_prefixes() -> None:
    (finding,) = continue_prompts(bench(methods("full") | absolute()), settings())
    steps = []
    for sample, offset in zip(finding.samples, spread([len(TEXT)], 5, CONTEXT), strict=True):
        prompt = TEXT[offset : offset + CONTEXT]
        full, sinks = by_whole_prefixes(prompt, None), by_whole_prefixes(prompt, BUDGET)
        assert [method["tokens"] for method in sample["methods"]] == [full, sinks]
        differ = [t for t in range(TOKENS) if full[t] != sinks[t]]
        steps.append(differ[0] if differ else TOKENS)
        assert sample["methods"][1]["divergence_step"] == (differ[0] if differ else None)
    assert len(set(steps)) > 1, "these prompts tell nothing"
    rows = finding.rows
    assert value(rows, "sinks", "divergence_step") == pytest.approx(np.mean(steps))
    assert value(rows, "sinks", "diverged_share") == np.mean([step < TOKENS for step in steps])
    (row,) = (row for row in rows if row.method == "sinks" and row.metric == "divergence_step")
    assert row.low is not None and row.high is not None and row.low <= np.mean(steps) <= row.high
    assert (row.n, row.context, row.protocol) == (5, CONTEXT, "greedy")
    assert f"cut off at {TOKENS}" in (row.note or "")


def test_full_and_recompute_never_leave() -> None:
    rows = rows_of(continue_prompts(bench(methods("full", "recompute")), settings()))
    for method in ("full", "recompute"):
        assert value(rows, method, "divergence_step") == TOKENS
        assert value(rows, method, "diverged_share") == 0
    assert not [row for row in rows if row.metric == "length_ratio"]  # no end was in sight


def test_engaged_and_kept() -> None:
    rows = rows_of(continue_prompts(bench(methods("full", "h2o", budget=12)), settings()))
    assert [value(rows, m, "engaged") for m in ("full", "h2o")] == [0, (TOKENS - 1) / TOKENS]  # the prompt gives one
    assert [value(rows, m, "kept_tokens") for m in ("full", "h2o")] == [CONTEXT + TOKENS - 1, 12]


def test_engaged_is_the_share_of_the_tokens_that_were_predicted_after_an_eviction() -> None:
    """Five fed tokens fit, the sixth evicts after its own step: seven predictions come from a whole cache."""
    rows = rows_of(continue_prompts(bench(methods("full", "h2o", budget=CONTEXT + 5)), settings()))
    assert value(rows, "h2o", "engaged") == pytest.approx((TOKENS - 7) / TOKENS)


def test_logits_that_are_not_finite_agree_with_nothing() -> None:
    broken = random_llama(4, 2, 16, dtype=torch.float32)
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    (finding,) = continue_prompts(run_context_of(broken, methods("full", "h2o"), TEXT), settings())
    scored = [row for row in finding.rows if row.metric in ("divergence_step", "diverged_share", "length_ratio")]
    assert len(scored) == 4
    assert all(flags_of(row) == {"not_finite"} and row.value != row.value for row in scored)
    assert {method["divergence_step"] for sample in finding.samples for method in sample["methods"]} == {None}


@pytest.mark.parametrize(
    ("mine", "full", "step"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([7], [1, 2], 0),
        ([1, 2], [1, 2, 3], 2),  # one ended where the other went on
        ([1, 2, 3], [1, 2], 2),
    ],
)
def test_where_two_answers_part(mine: list[int], full: list[int], step: int | None) -> None:
    assert divergence(mine, full) == step


@pytest.mark.parametrize("ends", [1, 2])
def test_lengths_at_the_natural_end(ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any token may be the end: those that both caches come to are taken, and answers are cut off behind them."""
    named = methods("full") | absolute()
    (free,) = continue_prompts(bench(named), settings(samples=8))
    said = [[method["tokens"] for method in sample["methods"]] for sample in free.samples]
    shared = [set(full) & set(sinks) for full, sinks in said]
    end = max({token for tokens in shared for token in tokens}, key=lambda token: sum(token in s for s in shared))
    stops = [end, 96][:ends]
    monkeypatch.setattr(measured, "end_tokens", lambda bench: stops)
    (finding,) = continue_prompts(bench(named), settings(samples=8))
    lengths = []
    for sample, (full, sinks) in zip(finding.samples, said, strict=True):
        cut = [answer[: next((t + 1 for t, a in enumerate(answer) if a in stops), None)] for answer in (full, sinks)]
        assert [method["tokens"] for method in sample["methods"]] == cut
        if all(answer[-1] in stops for answer in cut):
            lengths.append([len(answer) for answer in cut])
    assert lengths
    (row,) = (row for row in finding.rows if row.method == "sinks" and row.metric == "length_ratio")
    full_total, sinks_total = np.sum(lengths, axis=0)
    assert (row.value, row.n) == (pytest.approx(sinks_total / full_total), len(lengths))
    assert f"of the {len(lengths)} of 8 answers" in (row.note or "")
    (own,) = (row for row in finding.rows if row.method == "full" and row.metric == "length_ratio")
    assert (own.value, own.low, own.high) == (1, 1, 1)


def test_the_order_of_methods_and_samples_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(continue_prompts(bench(methods("full", "h2o", "random")), settings(samples=6)))
    turned = rows_of(continue_prompts(bench(methods("full", "random", "h2o")), settings(samples=6)))
    assert sorted(map(str, rows)) == sorted(map(str, turned))
    offsets = spread([len(TEXT)], 6, CONTEXT)
    monkeypatch.setattr(measured, "spread", lambda *_: [offsets[i] for i in (4, 0, 2, 5, 1, 3)])
    assert rows_of(continue_prompts(bench(methods("full", "h2o", "random")), settings(samples=6))) == rows


def test_one_broken_method_leaves_the_others_whole() -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how="failed", at=CONTEXT + 5), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(continue_prompts(here, settings()))
    assert {row.method for row in rows} == {"full", "h2o"}
    assert [(label, row.measure, row.context) for label, row in here.journal.failures] == [
        ("breaks", "fidelity", CONTEXT)
    ]


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    named = {"full": Method("full", Breaks(12, how="failed", at=CONTEXT + 5), DenseStore())} | methods("h2o")
    rows = rows_of(continue_prompts(bench(named), settings()))
    assert {row.metric for row in rows} == {"engaged", "kept_tokens"}


def test_prompts_are_spread_over_the_text() -> None:
    assert spread([1_000], 4, 40) == [0, 320, 640, 960]
    assert spread([40], 3, 40) == [0, 0, 0]
    assert spread([1_000], 1, 40) == [0]


def test_neighbours_in_a_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that end early must not cut short what a cache is asked to hold, nor those that go on make it longer."""
    named = methods("full", "kivi", "h2o")
    (free,) = continue_prompts(bench(named), settings())
    said = [sample["methods"][0]["tokens"] for sample in free.samples]
    monkeypatch.setattr(measured, "end_tokens", lambda bench: [said[0][3]])
    together, alone = (rows_of(continue_prompts(bench(named), settings(batch=batch))) for batch in (5, 1))
    assert [dataclasses.replace(row, batch=1) for row in together] == alone


def test_caches_that_never_diverge_are_no_proof_that_they_cannot() -> None:
    rows = rows_of(continue_prompts(bench(methods("full", "recompute")), settings()))
    (row,) = (row for row in rows if row.method == "recompute" and row.metric == "divergence_step")
    assert (row.value, row.high) == (TOKENS, TOKENS) and row.low is not None and 0 < row.low < TOKENS
