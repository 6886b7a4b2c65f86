"""What a prefill can be asked to record beside keys and values, by name."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.prefill import Combine, Scoring, column_sums, last_queries


@dataclass(frozen=True)
class Observation:
    """A named quantity of a layer's prompt attention. Equal observations are computed once a prefill."""

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
        """From query [B, Hq, T, D] and key [B, Hkv, T, D], both as attention sees them."""
        raise TypeError(f"{type(self).__name__} computes nothing")


@dataclass(frozen=True)
class ColumnSums(Observation):
    """Attention mass received by each token from all prompt queries: float32 [B, Hkv, T]."""

    combine: Combine = "sum"

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
        return column_sums(query, key, scoring, self.combine)


@dataclass(frozen=True)
class LastQueries(Observation):
    """Probabilities of the last `count` queries over all keys: float32 [B, Hkv, Hq / Hkv, count, T]."""

    count: int = 32

    def compute(self, query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
        return last_queries(query, key, scoring, self.count)
