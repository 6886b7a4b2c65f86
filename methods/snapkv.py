"""SnapKV: what the last queries of the prompt look at."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, Decode, KeepRule, is_whole
from kvbench.errors import UserError


@dataclass(frozen=True)
class SnapKV(KeepRule):
    """An observation window picks the prompt's tokens (Li et al., 2024, arXiv:2404.14469).

    The probabilities of the last `window` queries over all keys, summed over the window and averaged over the query
    heads of a KV head, max-pooled over `pool` neighbouring tokens; the best (budget - window) stay, and the window.
    Decode appends as in the paper, or holds the budget (decode "evict") by attention accumulated from there on.
    """

    window: int = 32
    pool: int = 7
    decode: Decode = "append"

    reads_attention = True

    def __post_init__(self) -> None:
        if not is_whole(self.window) or self.window < 1:
            raise UserError(f"window={self.window} observing queries for {self.name}; type window=32, for example")
        if not is_whole(self.pool) or self.pool < 1 or self.pool % 2 == 0:
            raise UserError(f"pool={self.pool} for {self.name}; type an odd number of tokens (the paper's is 7)")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        return self.window + 1

    @property
    def fixed_part(self) -> str:
        return f"the observation window of {self.window} and one pick"

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(self.window),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        seen = record.observed[LastQueries(self.window)].mean(2).sum(-2)  # [B, Hkv, T]
        before = seen[..., : max(0, seen.shape[-1] - self.window)]
        if before.shape[-1] == 0:
            return seen
        pooled = max_pool1d(before, self.pool, stride=1, padding=self.pool // 2)  # pads with -inf: not counted
        return torch.cat([pooled, seen[..., before.shape[-1] :]], dim=-1)

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return scores + probabilities.mean(2).sum(-2)

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return torch.where(position > newest - self.window, KEEP, scores)
