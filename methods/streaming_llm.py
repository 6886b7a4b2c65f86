"""StreamingLLM: attention sinks plus a sliding window."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.rule import KEEP, KeepRule, is_whole
from kvbench.errors import UserError

VARIANTS = ("in_cache", "absolute")


@dataclass(frozen=True)
class StreamingLLM(KeepRule):
    """The first `n_sink` tokens and the newest ones (Xiao et al., 2024, arXiv:2309.17453).

    budget = n_sink + window. Positions are those inside the cache (variant "in_cache"): keys in the window keep their
    relative distances, so only the distance to the sinks changes, and for the sinks alone the query is rotated back
    by the number of tokens evicted so far. Variant "absolute" keeps original positions.
    """

    n_sink: int = 4
    variant: str = "in_cache"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise UserError(f"variant={self.variant} is unknown to StreamingLLM; type {' or '.join(VARIANTS)}")
        if not is_whole(self.n_sink) or self.n_sink < 0:
            raise UserError(f"sinks={self.n_sink} for StreamingLLM; type sinks=0 or more (the paper's is sinks=4)")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        return self.n_sink + 1

    @property
    def fixed_part(self) -> str:
        return f"{self.n_sink} sinks and the newest token"

    @property
    def sinks_in_place(self) -> int:
        return self.n_sink if self.variant == "in_cache" else 0

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return torch.where(position < self.n_sink, KEEP, position.to(torch.float64))
