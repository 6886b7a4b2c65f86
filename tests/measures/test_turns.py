"""Turns: questions asked of one cache equal questions asked of a cache each, and turn 1 is what `needle` measures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import continuation
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.measures.context import RunContext
from kvbench.measures.measure import read_measure
from kvbench.measures.needle import Needle
from kvbench.measures.needle import answers as needle_answers
from kvbench.measures.needle.answers import ask_needles
from kvbench.measures.question_rows import tokens_of
from kvbench.measures.statistics import wilson
from kvbench.measures.turns import Turns
from kvbench.measures.turns import answers as measured
from kvbench.measures.turns.answers import ask_turns
from kvbench.methods.snapkv import SnapKV
from kvbench.models.load import LoadedModel
from kvbench.texts.prompts import Prompt, make_prompts
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, methods, prose, rows_of, run_context_of, value

TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(3_000))["input_ids"])
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)
LENGTH, TURNS = 480, 3
NAMED = {**methods("full", "h2o", "streaming_llm", "recompute", budget=40), "snapkv": None}
NAMED["snapkv"] = Method("snapkv", SnapKV(budget=40, window=8), DenseStore())


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    for module in (measured, needle_answers):
        monkeypatch.setattr(module, "end_tokens", lambda loaded: [])


def settings(**changes: Any) -> Turns:
    plain = Turns(lengths=[LENGTH], turns=TURNS, samples=2, question=["after"], answer_tokens=6)
    return dataclasses.replace(plain, **changes)


def context(**more: Any) -> RunContext:
    return run_context_of(MODEL, {name: NAMED[name] for name in NAMED}, TEXT, TOKENIZER, **more)


def prompts(asked: Turns) -> list[Prompt]:
    return make_prompts(TOKENIZER, TEXT, 0, asked, LENGTH)


def answers_in(asked: Turns, named: dict[str, Method] = NAMED) -> dict[tuple[str, int, int], str]:
    """By method, text and turn: the answers in the samples."""
    (result,) = ask_turns(run_context_of(MODEL, named, TEXT, TOKENIZER), asked)
    return {
        (one["method"], sample["sample"], number): one["answer"]
        for sample in result.samples
        for number, turn in enumerate(sample["turns"])
        for one in turn["methods"]
    }


def said(method: Method, prompt: list[int], fed: list[list[int]], question: list[int], count: int) -> str:
    """The answer of a new cache of the prompt that was fed these forwards and then the question."""
    cache = build_cache(MODEL, method, torch.tensor([prompt]), 600, max_step=300)
    for tokens in fed:
        cache.step(MODEL, torch.tensor([tokens]))
    found = continuation(MODEL, torch.tensor([question]) if question else None, cache, count)
    text: str = TOKENIZER.decode(tokens_of(found, 0, [])[0], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("mode", ["independent", "conversation"])
@pytest.mark.parametrize("when", ["after", "before"])
def test_every_answer_is_that_of_a_new_cache(mode: Any, when: Any) -> None:
    """Restoring a cache changes nothing: each turn is asked again of a cache that never saw another answer."""
    asked = settings(mode=[mode], question=[when], samples=1)
    found = answers_in(asked)
    assert len(found) == len(NAMED) * TURNS
    for prompt in prompts(asked):
        turns = prompt.turns
        compressed = prompt.ids + (turns[0].question if when == "before" else [])
        for number, turn in enumerate(turns[:TURNS]):
            is_open = when == "before" and number == 0
            fed = [one.question + one.right for one in turns[:number]] if mode == "conversation" else []
            if when == "before" and number:
                fed = [turns[0].right, *fed[1:]]
            for name, method in NAMED.items():
                want = said(method, compressed, fed, [] if is_open else turn.question, turn.answer_tokens)
                assert found[name, prompt.sample, number] == want, (name, number)


def test_the_full_cache_answers_as_prompts_of_their_own() -> None:
    """Independent turns of the full cache are prompts that end in the question, run without a cache."""
    asked = settings(samples=1)
    found = answers_in(asked, {"full": NAMED["full"]})
    for prompt in prompts(asked):
        for number, turn in enumerate(prompt.turns[:TURNS]):
            ids = torch.tensor([prompt.ids + turn.question])
            for _ in range(turn.answer_tokens):
                ids = torch.cat([ids, MODEL(ids).logits[:, -1:].argmax(-1)], dim=1)
            assert found["full", prompt.sample, number] == TOKENIZER.decode(
                ids[0, -turn.answer_tokens :], skip_special_tokens=True
            )


@pytest.mark.parametrize("task", ["key_value", "multi_needle"])
@pytest.mark.parametrize("when", ["after", "before"])
def test_turn_1_is_what_needle_measures(task: Any, when: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts, answers and hit rates. A hit is any answer whose characters' sum is even: half of them."""
    for module in (measured, needle_answers):
        monkeypatch.setattr(module, "score", lambda asked, text: float(sum(map(ord, text)) % 2 == 0))
    turns = settings(tasks=[task], question=[when], samples=4)
    needle = Needle(lengths=[LENGTH], depths=[0.5], samples=4, question=[when], tasks=[task], answer_tokens=6, batch=1)
    (by_turn,), (single,) = ask_turns(context(), turns), ask_needles(context(), needle)
    rates = set()
    for name in NAMED:
        rate = value(single.rows, name, "hit_rate", depth=None)
        assert value(by_turn.rows, name, "hit_rate_first") == rate
        assert value(by_turn.rows, name, "hit_rate_at", position=1) == rate
        assert value(by_turn.rows, name, "kept_tokens") > 0 or name == "recompute"
        rates.add(rate)
    assert len(rates) > 1  # the test can tell methods apart
    for sample, other in zip(by_turn.samples, single.samples, strict=True):
        said_first = [(one["method"], one["answer"]) for one in sample["turns"][0]["methods"]]
        assert said_first == [(one["method"], one["answer"]) for one in other["methods"]]


def test_rows_by_turn_and_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores given by hand: the first turn always right, of the later ones the second of text 0 only."""
    both = {name: NAMED[name] for name in ("full", "streaming_llm")}
    scores = {"full": iter([1, 1, 0, 1, 0, 0]), "streaming_llm": iter([1, 0, 0, 0, 0, 0])}

    def answer(model: object, fed: Tensor | None, cache: Any, count: int) -> Any:
        names.append("full" if cache.kept_tokens >= LENGTH else "streaming_llm")
        return continuation(MODEL, fed, cache, count)

    names: list[str] = []
    monkeypatch.setattr(measured, "continuation", answer)
    monkeypatch.setattr(measured, "score", lambda asked, text: float(next(scores[names[-1]])))
    rows = rows_of(ask_turns(run_context_of(MODEL, both, TEXT, TOKENIZER), settings()))
    assert value(rows, "full", "hit_rate") == pytest.approx(3 / 6)
    assert [value(rows, "full", "hit_rate_at", position=turn) for turn in (1, 2, 3)] == [1, 0.5, 0]
    assert value(rows, "full", "hit_rate_first") == 1
    assert value(rows, "full", "hit_rate_later") == 0.25
    assert value(rows, "full", "later_minus_first") == -0.75
    assert value(rows, "streaming_llm", "hit_rate_minus_full") == pytest.approx(1 / 6 - 3 / 6)
    (first,) = [row for row in rows if row.method == "full" and row.metric == "hit_rate_at" and row.position == 1]
    assert (first.low, first.high) == wilson(2, 2) and first.n == 2
    assert {row.protocol for row in rows} == {"multi_needle/independent"} and {row.context for row in rows} == {LENGTH}
    assert {row.n for row in rows if row.metric == "hit_rate"} == {6}


def test_one_question_has_no_later_turns() -> None:
    rows = rows_of(ask_turns(context(), settings(turns=1, samples=1)))
    assert not {row.metric for row in rows} & {"hit_rate_later", "later_minus_first"}


def test_a_task_that_the_full_cache_cannot_do_is_left_out() -> None:
    here = context()
    rows = rows_of(ask_turns(here, settings(skip_below=0.5, samples=1)))
    assert {row.method for row in rows} == {"full"}  # a model with random weights answers nothing
    assert "uninformative" in (rows[0].flags or "")
    assert set(here.journal.skipped) == set(NAMED) - {"full"}


def test_a_failure_of_one_method_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(model: object, fed: Tensor | None, cache: Any, count: int) -> Any:
        if cache.recomputes:
            raise RuntimeError("broken")
        return continuation(MODEL, fed, cache, count)

    monkeypatch.setattr(measured, "continuation", answer)
    here = context()
    rows = rows_of(ask_turns(here, settings(samples=1)))
    assert {row.method for row in rows} == set(NAMED) - {"recompute"}
    ((label, row),) = here.journal.failures
    assert (label, row.protocol, row.status) == ("recompute", "multi_needle/independent", "failed")


@pytest.mark.slow
def test_a_rule_that_knows_one_question_fails_at_the_next_and_a_replay_does_not(
    smollm2: LoadedModel, essays_folder: Path
) -> None:
    """The first question is compressed with the text, a third of which stays."""
    text = "".join(file.read_text() for file in sorted(essays_folder.glob("*.txt"))[:8])
    tokens = torch.tensor(smollm2.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    kvzip = load_method("kvzip", budget=128)
    named = {
        "full": NAMED["full"],
        "snapkv": load_method("snapkv", budget=128, window=9, pool=15),
        "kvzip": dataclasses.replace(kvzip, rule=kvzip.rule.for_tokenizer(smollm2.tokenizer)),
    }
    asked = Turns(lengths=[384], turns=2, samples=4, question=["before"])
    rows = rows_of(ask_turns(run_context_of(smollm2.model, named, tokens, smollm2.tokenizer), asked))
    first, later = ({name: value(rows, name, f"hit_rate_{turn}") for name in named} for turn in ("first", "later"))
    assert first["full"] >= 0.8 and later["full"] >= 0.8
    assert first["snapkv"] >= 0.4 and later["snapkv"] <= first["snapkv"] - 0.4
    assert first["kvzip"] >= 0.8 and later["kvzip"] >= 0.8


def test_hindsight_is_given_all_questions() -> None:
    """A bound for conversations: it sees every question that is not in the prompt, and every right answer."""
    named = methods("full", budget=40) | {"hindsight": load_method("hindsight", budget=40)}
    here = run_context_of(MODEL, named, TEXT, TOKENIZER)
    rows = rows_of(ask_turns(here, settings(samples=1, turns=2, question=["after", "before"])))
    assert not here.journal.failures
    assert {(row.method, row.question) for row in rows} == {
        (name, when) for name in named for when in ("after", "before")
    }


def test_cells_are_lengths_tasks_and_modes() -> None:
    asked = settings(lengths=[600, 700], tasks=["key_value", "variables"], mode=["independent", "conversation"])
    cells = asked.cells()
    assert len(cells) == 8 and len(set(map(str, cells))) == 8
    assert {cell.task for cell in cells} == {
        f"{task} {mode}" for task in ("key_value", "variables") for mode in ("independent", "conversation")
    }
    assert asked.task is None and asked.prompts() == [600, 700]


@pytest.mark.parametrize("mode", ["independent", "conversation"])
@pytest.mark.parametrize("when", ["after", "before"])
def test_the_room_is_enough_and_not_much_more(mode: Any, when: Any) -> None:
    """A smaller room would be refused by the cache: see `CacheFull`. A conversation counts every turn."""
    asked = settings(mode=[mode], question=[when])
    (prompt, _) = prompts(asked)
    sizes = [len(turn.question) + max(6, len(turn.right)) for turn in prompt.turns[:TURNS]]
    most = asked.most_asked_tokens(prompt)
    assert most == (sum(sizes) if mode == "conversation" else max(sizes) + (sizes[0] if when == "before" else 0))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"turns": 9}, "turns.turns=9 is above the largest value, 8"),
        ({"mode": ["both"]}, "type turns.mode=independent or turns.mode=conversation"),
        ({"tasks": ["vt"]}, "turns.tasks=vt is unknown"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        read_measure("turns", {"_target_": "kvbench.measures.turns.Turns", **changes})
