"""Answers to questions, and the rows that every measure with questions yields."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvbench.measures.context import MethodRun
from kvbench.measures.result import engagement_rows
from kvbench.measures.statistics import bounded_interval, bounds, units_of
from kvbench.results.row import Row, with_flags


@dataclass(frozen=True)
class Answer:
    """A method's answer.

    score: from 0 to 1. engaged: whether its cache had been compressed. kept: tokens held at the end.
    """

    text: str
    score: float
    engaged: bool
    kept: float


Answers = dict[tuple[str, str], dict[int, Answer]]
"""By method and question time (after, before); then by the number of the prompt."""


def mean_over(scores: Iterable[float], seed: int, lowest: float = 0.0) -> dict[str, Any]:
    """The mean of independent scores from `lowest` to 1 and its interval, as the columns of a row."""
    units = units_of(np.array(list(scores), dtype=np.float64)[:, None])
    return {"value": units.mean, **bounds(bounded_interval(units, lowest, 1.0, seed))}


def above_full(base: Row, mine: Sequence[float], full: Sequence[float], seed: int) -> Row:
    """The mean of the paired differences to the full cache's scores, flagged where its interval lies above zero."""
    found = mean_over([a - b for a, b in zip(mine, full, strict=True)], seed, lowest=-1.0)
    flagged = with_flags(base, "better_than_full") if found["low"] > 0 else base
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
    """An answer from a cache: whether the cache had been compressed, and the tokens that it held at the end."""

    @property
    def engaged(self) -> bool: ...
    @property
    def kept(self) -> float: ...


def engagement(base: Row, answers: Collection[FromCache]) -> Iterator[Row]:
    """Rows engaged and kept_tokens: means over the answers."""
    n = len(answers)
    engaged, kept = sum(answer.engaged for answer in answers), sum(answer.kept for answer in answers)
    yield from engagement_rows(base, engaged / n, kept / n)
