"""Needle: hits beyond the recent window, tasks that are skipped, and the length of answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.cache.decode import Continuation
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.measures.context import RunContext
from kvbench.measures.measure import read_measure
from kvbench.measures.needle import Needle
from kvbench.measures.needle import answers as measured
from kvbench.measures.needle.answers import ask_needles
from kvbench.measures.statistics import wilson
from kvbench.texts.needle_tasks import TASKS
from kvbench.texts.prompts import make_prompts
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, methods, prose, rows_of, run_context_of, value

TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(3_000))["input_ids"])
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)
LENGTH = 160
ONE_NEEDLE = (
    "single_number",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "qa_one_hop",
)


def settings(**changes: Any) -> Needle:
    plain = Needle(lengths=[LENGTH], depths=[0.0, 0.4, 0.8, 1.0], samples=2, question=["after"], batch=4)
    return dataclasses.replace(plain, **changes)


def bench(named: dict[str, Method], **more: Any) -> RunContext:
    return run_context_of(MODEL, named, TEXT, TOKENIZER, **more)


@dataclass(frozen=True)
class Newest(KeepRule):
    """A plain recency window."""

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return position.to(torch.float64)


def answers(monkeypatch: pytest.MonkeyPatch, hits: dict[bool, str]) -> None:
    """Make the full cache (True) and the others (False) give these answers; `1` is a hit."""

    def answer(model: object, question: object, cache: Any, count: int) -> Continuation:
        token = TOKENIZER.convert_tokens_to_ids(hits[cache.kept_tokens >= LENGTH])
        tokens = torch.full((cache.last_logits.shape[0], count), token)
        return Continuation(tokens, [False] * count, torch.ones_like(tokens, dtype=torch.bool))

    monkeypatch.setattr(measured, "continuation", answer)
    monkeypatch.setattr(measured, "score", lambda asked, text: float(text[0] == "1"))


# where the needle stands


@pytest.mark.parametrize("task", TASKS)
def test_the_span_holds_the_needle_and_no_token_more(task: str) -> None:
    asked = settings(tasks=[task], lengths=[2_500])
    for prompt in make_prompts(TOKENIZER, TEXT, 0, asked, 2_500):
        if task not in ONE_NEEDLE:
            assert prompt.needle_span is None
            continue
        assert prompt.needle_span is not None and prompt.draft.answer_needle is not None
        start, stop = prompt.needle_span
        found = TOKENIZER.decode(prompt.ids[start:stop])
        assert found == prompt.draft.answer_needle.strip()  # a token is a character
        assert prompt.draft.references[0] in found


@pytest.mark.parametrize("question", ["after", "before"])
@pytest.mark.parametrize("decode", ["append", "evict"])
def test_a_recency_window_holds_no_token_of_a_needle_beyond_it(question: str, decode: Any) -> None:
    """And some token of every other needle, before anything else is evicted."""
    rule = Newest(60, decode=decode)
    asked = settings(depths=[0.0, 0.2, 0.5, 0.6, 0.7, 0.8, 1.0], samples=4, question=[question])
    context = bench(methods("full") | {"newest": Method("newest", rule, DenseStore())}, save_kept=True)
    (result,) = ask_needles(context, asked)
    held = {kept.sample: {p for head in kept.layers[0] for p in head} for kept in context.journal.kept}
    beyond = []
    for number, sample in enumerate(result.samples):
        start = LENGTH - sample["needle_distance"]
        needle = set(range(start, start + sample["needle_tokens"]))
        compressed = LENGTH + (sample["question_tokens"] if question == "before" else 0)
        beyond.append(max(needle) < compressed - 60)
        if beyond[-1]:
            assert not needle & held[number]
        elif decode == "append":
            assert needle & held[number]
    assert 0 < sum(beyond) < len(beyond)
    for metric, n in (("hit_rate_beyond_recent", sum(beyond)), ("hit_rate_within_recent", len(beyond) - sum(beyond))):
        (row,) = (row for row in result.rows if row.method == "newest" and row.metric == metric)
        assert (row.n, row.depth, row.question, row.context) == (n, None, question, LENGTH)


def test_the_split_rates_are_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method by its own budget, one without a budget by the smallest."""
    monkeypatch.setattr(measured, "score", lambda asked, text: float(int(asked.references[0]) % 2 == 1))
    named = methods("full", "kivi", "h2o", budget=50)
    named |= {"random": methods("random", budget=90)["random"]}
    (result,) = ask_needles(bench(named), settings(samples=6))
    for method, window in (("full", 50), ("kivi", 50), ("h2o", 50), ("random", 90)):
        hits: dict[str, list[int]] = {"hit_rate_beyond_recent": [], "hit_rate_within_recent": []}
        for sample in result.samples:
            (own,) = (one for one in sample["methods"] if one["method"] == method)
            last = sample["needle_distance"] - sample["needle_tokens"]  # tokens after the needle
            hits["hit_rate_beyond_recent" if last >= window else "hit_rate_within_recent"].append(own["hit"])
        for metric, found in hits.items():
            (row,) = (row for row in result.rows if row.method == method and row.metric == metric)
            assert (row.n, row.value) == (len(found), sum(found) / len(found))
            assert (row.low, row.high) == wilson(round(sum(found)), len(found))
            without = f"recent: the newest {window} tokens, the smallest budget measured beside it"
            assert row.note == (without if method in ("full", "kivi") else None)
        pairs = [
            row for row in result.rows if row.method == method and row.metric == "hit_rate_beyond_recent_minus_full"
        ]
        assert [row.value for row in pairs] == ([] if method == "full" else [0.0])


@pytest.mark.parametrize(("more", "metric"), [(0, "hit_rate_beyond_recent"), (1, "hit_rate_within_recent")])
def test_one_token_of_the_needle_within_the_window_is_enough(more: int, metric: str) -> None:
    asked = settings(depths=[0.4], samples=1)
    (prompt,) = make_prompts(TOKENIZER, TEXT, 0, asked, LENGTH)
    assert prompt.needle_span is not None
    budget = LENGTH - prompt.needle_span[1] + more
    rows = rows_of(ask_needles(bench(methods("full", "h2o", budget=budget)), asked))
    assert {row.metric for row in rows if "recent" in str(row.metric) and row.method == "full"} == {metric}


@pytest.mark.parametrize(("named", "task"), [(("full", "kivi"), "single_number"), (("full", "h2o"), "niah_multivalue")])
def test_without_a_budget_or_with_several_needles_nothing_is_split(named: tuple[str, ...], task: str) -> None:
    rows = rows_of(ask_needles(bench(methods(*named)), settings(tasks=[task], lengths=[700], depths=[0.5])))
    assert {row.metric for row in rows if "recent" in str(row.metric)} == set()
    assert {row.method for row in rows} == set(named)


# tasks that the full cache cannot do


def test_a_task_that_the_full_cache_cannot_do_is_asked_of_no_other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {True: "x", False: "1"})
    context = bench(methods("full", "h2o", "random"))
    (result,) = ask_needles(context, settings(skip_below=0.5, question=["after", "before"]))
    assert {(row.method, row.question) for row in result.rows} == {("full", "after"), ("full", "before")}
    assert [one["method"] for one in result.samples[0]["methods"]] == ["full"]
    assert set(context.journal.skipped) == {"h2o", "random"}
    assert "0.00, below needle.skip_below" in context.journal.skipped["h2o"]
    assert not context.journal.failures


def test_a_task_that_the_full_cache_can_do_has_the_rows_that_it_has_without_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(**changes: Any) -> list[Any]:
        return rows_of(ask_needles(bench(methods("full", "h2o", "random", "kivi")), settings(**changes)))

    assert found(skip_below=0.0) == found()
    answers(monkeypatch, {True: "1", False: "x"})
    assert found(skip_below=1.0, question=["after", "before"]) == found(question=["after", "before"])
    assert value(found(skip_below=1.0), "h2o", "hit_rate", depth=None) == 0


def test_each_task_is_skipped_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "score", lambda asked, text: float(not asked.first_number))  # niah_single_1
    asked = settings(tasks=["single_number", "niah_single_1"], lengths=[300], depths=[0.5], skip_below=0.5)
    easy, hard = "niah_single_1", "single_number"
    rows = rows_of(ask_needles(bench(methods("full", "h2o")), asked))
    assert {(row.protocol, row.method) for row in rows} == {(hard, "full"), (easy, "full"), (easy, "h2o")}


# settings


@pytest.mark.parametrize(
    ("task", "most", "tokens"),
    [("niah_single_1", 32, 32), ("niah_single_1", None, 128), ("single_number", 32, 12), ("niah_multivalue", 4, 34)],
)
def test_answers_are_capped_but_hold_all_that_is_asked_for(task: str, most: int | None, tokens: int) -> None:
    asked = settings(tasks=[task], lengths=[1_500], depths=[0.5], samples=1, answer_tokens=most)
    (prompt,) = make_prompts(TOKENIZER, TEXT, 0, asked, 1_500)
    assert prompt.answer_tokens == tokens
    if task == "single_number":
        notes = {row.note for row in rows_of(ask_needles(bench(methods("full")), asked))}
        assert notes == {f"answers of at most {tokens} tokens"}


def test_every_task_of_every_length_is_a_cell() -> None:
    cells = settings(lengths=[100, 200], tasks=["single_number", "vt"]).cells()
    assert [(cell.lengths, cell.tasks) for cell in cells] == [
        ([100], ["single_number"]),
        ([100], ["vt"]),
        ([200], ["single_number"]),
        ([200], ["vt"]),
    ]


@pytest.mark.parametrize("key", ["answer_tokens", "skip_below"])
def test_settings_may_be_null(key: str) -> None:
    target = {"_target_": "kvbench.measures.needle.Needle"}
    assert read_measure("needle", target | {key: None}).settings()[key] is None
    assert read_measure("needle", target | {key: 1}).settings()[key] == 1
    with pytest.raises(UserError, match=f"needle.{key}=many is not a"):
        read_measure("needle", target | {key: "many"})
