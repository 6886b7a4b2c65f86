"""The rows and samples of several questions to one cache: hits by turn, and what later turns lose.

In rows of `hit_rate_at` the column `position` holds the number of the turn, from 1. Turns about one text depend on each
other, so intervals over several turns are drawn over texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.question_rows import (
    Answers,
    above_full,
    answers_of,
    engagement,
    finite_flags,
    mean_over,
    rate_over,
)
from kvbench.measures.turns import Turns
from kvbench.results.row import Row, with_flags
from kvbench.texts.prompts import Prompt
from kvbench.texts.templates import template_of
from kvbench.texts.tokens import token_hash

AnswersByTurn = list[Answers]
"""The answers of each turn."""


@dataclass(frozen=True)
class AskedTurns:
    """The prompts of one task and mode at one length, and the settings that they come from."""

    settings: Turns
    task: str
    mode: str
    length: int
    prompts: list[Prompt]

    @property
    def where(self) -> dict[str, Any]:
        """The columns that tell its rows from those of other tasks, modes and lengths."""
        return {"context": self.length, "protocol": f"{self.task}/{self.mode}"}


def turn_rows(
    context: RunContext, asked: AskedTurns, method: MethodRun, when: str, answers: AnswersByTurn
) -> Iterator[Row]:
    """A method's rows: hit_rate, hit_rate_at each turn, hit_rate_first, hit_rate_later, later_minus_first,
    hit_rate_minus_full, engaged, kept_tokens."""
    mine = [of_turn[method.label, when] for of_turn in answers]
    full = [of_turn[context.baseline.label, when] for of_turn in answers]
    texts, seed = range(len(asked.prompts)), context.seed
    every = [answer for of_turn in mine for answer in of_turn.values()]
    base = with_flags(replace(_base(context, asked, method, when), n=len(every)), *finite_flags(every))
    paired = all(len(of_turn) == len(texts) for of_turn in full)
    if paired and not any(answer.score for of_turn in full for answer in of_turn.values()):
        base = with_flags(base, "uninformative")
    scores = [[of_turn[i].score for of_turn in mine] for i in texts]
    yield replace(base, metric="hit_rate", unit="share", **mean_over(map(mean, scores), seed))
    for turn, of_turn in enumerate(zip(*scores, strict=True), 1):
        here = replace(base, n=len(texts), position=turn)
        yield replace(here, metric="hit_rate_at", unit="share", **rate_over(of_turn, seed))
    first, later = [one[0] for one in scores], [one[1:] for one in scores]
    yield replace(base, metric="hit_rate_first", unit="share", n=len(texts), **rate_over(first, seed))
    if len(mine) > 1:
        here = replace(base, unit="share", n=len(every) - len(texts))
        yield replace(here, metric="hit_rate_later", **mean_over(map(mean, later), seed))
        drops = [mean(rest) - one for one, rest in zip(first, later, strict=True)]
        yield replace(here, metric="later_minus_first", **mean_over(drops, seed, lowest=-1.0))
    if paired and not method.is_baseline:
        here = with_flags(base, *finite_flags(answer for of_turn in full for answer in of_turn.values()))
        theirs = [mean([of_turn[i].score for of_turn in full]) for i in texts]
        yield above_full(replace(here, metric="hit_rate_minus_full"), list(map(mean, scores)), theirs, seed)
    yield from engagement(base, every)


def mean(scores: Sequence[float]) -> float:
    """The mean of some scores."""
    return sum(scores) / len(scores)


def _base(context: RunContext, asked: AskedTurns, method: MethodRun, when: str) -> Row:
    template = template_of(context.loaded.tokenizer, asked.settings.template).sha256
    note = f"{asked.settings.turns} questions about each of {len(asked.prompts)} texts"
    return replace(
        method.row,
        measure="turns",
        question=when,
        batch=1,
        bos=None if template else method.row.bos,  # a chat template brings its own
        note=f"{note}; chat template {template[:12]}" if template else note,
        **asked.where,
    )


def sample_of(
    context: RunContext, asked: AskedTurns, methods: Sequence[MethodRun], i: int, when: str, answers: AnswersByTurn
) -> dict[str, Any]:
    """What samples.jsonl records of one text, its questions and their answers."""
    prompt = asked.prompts[i]
    turns = prompt.turns[: len(answers)]
    sample: dict[str, Any] = {
        "measure": "turns",
        "task": asked.task,
        "mode": asked.mode,
        "length": asked.length,
        "sample": prompt.sample,
        "question": when,
        "sha256": token_hash(prompt.ids + [token for turn in turns for token in turn.question + turn.right]),
        "turns": [
            {"references": list(turn.asked.references), "methods": answers_of(methods, of_turn, when, i, "hit")}
            for turn, of_turn in zip(turns, answers, strict=True)
        ],
    }
    if context.save_tokens:
        sample["ids"] = prompt.ids
        sample["turn_ids"] = [turn.question for turn in turns]
    return sample
