"""Key norm: keys of small norm draw attention, so they stay."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, Decode, KeepRule, check_decode


@dataclass(frozen=True)
class KNorm(KeepRule):
    """Keeps the keys with the lowest L2 norm (Devoto et al., 2024, arXiv:2406.11430): score -||k||.

    No attention is looked at. The newest token stays. Decode holds the budget, or appends.
    """

    decode: Decode = "evict"

    def __post_init__(self) -> None:
        check_decode(self.name, self.decode)
        super().__post_init__()

    @property
    def holds_budget(self) -> bool:
        return self.decode == "evict"

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.fresh_scores(record.key)

    def fresh_scores(self, key: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(key.to(torch.float32), dim=-1)
        return -norm

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        if scores is None:
            raise TypeError("KNorm decides by scores")
        return torch.where(position == newest, KEEP, scores)
