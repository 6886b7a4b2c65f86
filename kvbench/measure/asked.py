"""What measures that ask questions have in common: answers, and the rows that go with any of them."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvbench.measure.statistics import bounds, mean_interval, units_of
from kvbench.rows import Row


@dataclass(frozen=True)
class Answer:
    """What a method answered. score: from 0 to 1. engaged: whether its cache had been compressed before; kept: tokens
    it held at the end."""

    text: str
    score: float
    engaged: bool
    kept: float


Answers = dict[tuple[str, str], dict[int, Answer]]
"""By method and by when the question came; then by the number of the prompt."""


def mean_over(samples: Iterable[float], seed: int) -> dict[str, Any]:
    """The mean of independent samples and its bootstrap interval, as the columns of a row."""
    units = units_of(np.array(list(samples), dtype=np.float64)[:, None])
    return {"value": units.mean, **bounds(mean_interval(units, seed))}


class FromCache(Protocol):
    """Whatever came out of a cache: whether it had been compressed before, and tokens held at the end."""

    @property
    def engaged(self) -> bool: ...
    @property
    def kept(self) -> float: ...


def engagement(base: Row, answers: Collection[FromCache]) -> Iterator[Row]:
    """Rows engaged and kept_tokens: means over the answers."""
    n = len(answers)
    yield replace(base, metric="engaged", unit="share", value=sum(answer.engaged for answer in answers) / n)
    yield replace(base, metric="kept_tokens", unit="tokens", value=sum(answer.kept for answer in answers) / n)
