"""Answers to questions, and the rows that every measure with questions yields."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvbench.cache.decode import Continuation
from kvbench.measures.context import MethodRun
from kvbench.measures.result import engagement_rows
from kvbench.measures.statistics import bounded_interval, bounds, units_of, wilson
from kvbench.results.row import Row, with_flags


@dataclass(frozen=True)
class Answer:
    """A method's answer.

    score: from 0 to 1, nan where the answer is not finite. engaged: share of its tokens that were predicted after an
    eviction or a quantisation. kept: tokens held at the end. finite: whether all its logits were.
    """

    text: str
    score: float
    engaged: float
    kept: float
    finite: bool = True


Answers = dict[tuple[str, str], dict[int, Answer]]
"""By method and question time (after, before); then by the number of the prompt."""


def first_time(question: Sequence[str]) -> str:
    """Of the times of a question (after, before) the one whose answers decide whether a task can be done."""
    return "after" if "after" in question else question[0]


def tokens_of(said: Continuation, row: int, ends: Collection[int]) -> tuple[list[int], float, bool]:
    """An answer's tokens up to and with its end token, the share of them that is engaged, and whether all are finite.

    said: the continuation of a batch. row: the answer's number in it.
    """
    tokens: list[int] = said.tokens[row].tolist()
    n = next((t + 1 for t, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:n], sum(said.engaged[:n]) / n, bool(said.finite[row, :n].all())


def answer_of(
    tokenizer: Any, said: Continuation, row: int, ends: Collection[int], kept: float, score: Callable[[str], float]
) -> Answer:
    """A method's answer to one prompt of a batch.

    said, row, ends: as `tokens_of` takes them. kept: tokens that the cache holds at the end. score: of a text.
    """
    tokens, engaged, finite = tokens_of(said, row, ends)
    text = answer_text(tokenizer, tokens, ends)
    return Answer(text, score(text) if finite else math.nan, engaged, kept, finite)


def mean_over(scores: Iterable[float], seed: int, lowest: float = 0.0) -> dict[str, Any]:
    """The mean of independent scores from `lowest` to 1 and its interval, as the columns of a row.

    nan without an interval where a score is nan.
    """
    units = units_of(np.array(list(scores), dtype=np.float64)[:, None])
    if math.isnan(units.mean):
        return {"value": math.nan}
    return {"value": units.mean, **bounds(bounded_interval(units, lowest, 1.0, seed))}


def rate_over(scores: Sequence[float], seed: int) -> dict[str, Any]:
    """As `mean_over`, with Wilson's interval where all scores are hits and misses."""
    if all(score in (0, 1) for score in scores):
        return {"value": sum(scores) / len(scores), **bounds(wilson(round(sum(scores)), len(scores)))}
    return mean_over(scores, seed)


def above_full(base: Row, mine: Sequence[float], full: Sequence[float], seed: int) -> Row:
    """The mean of the paired differences to the full cache's scores, flagged where its interval lies above zero."""
    found = mean_over([a - b for a, b in zip(mine, full, strict=True)], seed, lowest=-1.0)
    flagged = with_flags(base, "better_than_full") if found.get("low", 0) > 0 else base
    return replace(flagged, unit="share", **found)


def answers_of(
    methods: Iterable[MethodRun], answers: Answers, when: str, prompt: int, score: str
) -> list[dict[str, Any]]:
    """What a sample records of each method: its name, store and knobs, its answer, and under `score` the score."""
    given = ((method, answers[method.label, when][prompt]) for method in methods)
    return [
        {
            "method": method.row.method,
            "store": method.row.store,
            "knobs": method.knobs,
            "answer": answer.text,
            score: answer.score,
        }
        for method, answer in given
    ]


def answer_text(tokenizer: Any, tokens: Sequence[int], ends: Collection[int]) -> str:
    """The text of an answer up to its end token, without special tokens."""
    stop = next((t for t, token in enumerate(tokens) if token in ends), None)
    text: str = tokenizer.decode(tokens[:stop], skip_special_tokens=True)
    return text


class FromCache(Protocol):
    """An answer from a cache: the share of its tokens that is engaged, the tokens that the cache held at the end, and
    whether the answer's logits were finite."""

    @property
    def engaged(self) -> float: ...
    @property
    def kept(self) -> float: ...
    @property
    def finite(self) -> bool: ...


def finite_flags(answers: Iterable[FromCache]) -> list[str]:
    """The flag of rows that are computed from these answers: not_finite where the logits of one were not."""
    return [] if all(answer.finite for answer in answers) else ["not_finite"]


def engagement(base: Row, answers: Collection[FromCache]) -> Iterator[Row]:
    """Rows engaged and kept_tokens: means over the answers."""
    n = len(answers)
    engaged, kept = sum(answer.engaged for answer in answers), sum(answer.kept for answer in answers)
    yield from engagement_rows(base, engaged / n, kept / n)
