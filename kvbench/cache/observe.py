"""Named quantities that a prefill can record beside keys and values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.cache.rotary import RotateBack
from kvbench.errors import UserError
from kvbench.kernels.prefill import Combine, Scoring, column_sums, last_queries, query_moments


@dataclass(frozen=True)
class Observation:
    """A named quantity of a layer's prompt attention. Equal observations are computed once per prefill."""

    before_rotation: ClassVar[bool] = False
    """Whether it is computed from queries before their rotary embedding."""
    from_prompt: ClassVar[bool] = True
    """Whether `compute` gives it from the prompt's queries and keys alone; else `prefill` adds it to the record."""

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        """The quantity, from query [B, Hq, T, D] and key [B, Hkv, T, D] with their rotary embedding.

        rotation: removes the query's rotary embedding; given where `before_rotation`.
        """
        raise TypeError(f"{type(self).__name__} does not define `compute`")

    def of_chunk(self, probabilities: Tensor) -> Tensor:
        """The quantity of a chunk of a prompt, from its probabilities [B, Hkv, Hq / Hkv, q, T] over T held tokens.

        For rules with `observed_scores`; a quantity that probabilities do not give needs the prompt in one piece.
        """
        raise TypeError(f"{type(self).__name__} does not define `of_chunk`")


@dataclass(frozen=True)
class ColumnSums(Observation):
    """Attention mass that each token receives from all prompt queries: float32 [B, Hkv, T]."""

    combine: Combine = "sum"

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        return column_sums(query, key, scoring, self.combine)


@dataclass(frozen=True)
class LastQueries(Observation):
    """Probabilities of the last `count` queries over all keys: float32 [B, Hkv, Hq / Hkv, count, T]."""

    count: int = 32

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        return last_queries(query, key, scoring, self.count)

    def of_chunk(self, probabilities: Tensor) -> Tensor:
        return probabilities[..., -self.count :, :].to(torch.float32)


@dataclass(frozen=True)
class RecentQueries(Observation):
    """The last `count` queries themselves, rotated: [B, Hq, count, D], fewer for a shorter prompt.

    Of a rule that scores tokens anew when decode evicts, the layer keeps the newest `count` queries from then on.
    """

    count: int = 8

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        return query[:, :, -self.count :].clone()


@dataclass(frozen=True)
class QueriesAt(Observation):
    """The queries at some positions, with their rotary embedding: [B, Hq, n, D] for n `positions`."""

    positions: tuple[int, ...] = ()

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        return query[:, :, list(self.positions)]


def recent_queries(observations: Iterable[Observation]) -> int:
    """How many of the newest queries a rule with these observations is given at each eviction; 0: none."""
    return next((each.count for each in observations if isinstance(each, RecentQueries)), 0)


SOFTCAPPED = (
    "soft-capped scores have no closed-form expectation over queries; choose another method than expected_attention"
)


@dataclass(frozen=True)
class QueryMoments(Observation):
    """Mean and covariance of the un-rotated queries from position `first` on: float32 [B, Hq, 1 + D, D], mean first.

    Raises UserError for soft-capped scores: for them normally distributed queries give no closed-form expectation.
    """

    first: int = 4
    before_rotation: ClassVar[bool] = True

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring, rotation: RotateBack | None = None) -> Tensor:
        if rotation is None:
            raise UserError("query_moments need queries before the rotary embedding, and this layer cannot undo it")
        if scoring.softcap is not None:
            raise UserError(SOFTCAPPED)
        return query_moments(query, self.first, rotation.to_start)
