"""H2O: heavy hitters plus recent tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.observe import ColumnSums, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, KeepRule, is_whole
from kvbench.errors import UserError
from kvbench.kernels.prefill import Combine, combine_heads


@dataclass(frozen=True)
class H2O(KeepRule):
    """Heavy hitters plus recent tokens (Zhang et al., 2023, arXiv:2306.14048).

    Keeps, per KV head, the `heavy` tokens with the largest attention mass received so far and the `recent` newest
    ones; `heavy` is the rest of the budget, which splits evenly unless `recent` is given. Scores are float32, from
    the token's birth, over all prefill queries and then each decode step, the query heads of a KV head summed
    (`combine`: or their mean, or their maximum). Survivors keep their scores; ties give up the older token.
    """

    recent: int | None = None
    combine: Combine = "sum"

    reads_attention = True

    def __post_init__(self) -> None:
        if self.combine not in ("sum", "mean", "max"):
            raise UserError(f"variant={self.combine} is not a way to combine heads for H2O; type sum, mean or max")
        if self.recent is not None and (not is_whole(self.recent) or self.recent < 1):
            raise UserError(f"window={self.recent} recent tokens for H2O; type window=1 or more")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        return 2 if self.recent is None else self.recent + 1

    @property
    def fixed_part(self) -> str:
        return f"{self.recent or 1} recent and one heavy hitter"

    def observations(self) -> tuple[Observation, ...]:
        return (ColumnSums(self.combine),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return record.observed[ColumnSums(self.combine)]

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return scores + combine_heads(probabilities, self.combine).sum(-2)

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        recent = budget // 2 if self.recent is None else self.recent
        return torch.where(position > newest - recent, KEEP, scores)
