"""SnapKV: keeps the tokens that the prompt's last queries attend to."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule
from kvbench.cache.rule_settings import choice, whole


@dataclass(frozen=True)
class SnapKV(KeepRule):
    """The last queries of the prompt pick the tokens that stay (Li et al., 2024, arXiv:2404.14469).

    The score is the probability of a token for the last `window` queries (the observation window), summed over these
    queries, averaged over the query heads of a KV head, and max-pooled over `pool` neighbouring tokens. The window and
    the best (budget - window) tokens stay. Pooling gives the neighbours of a peak the peak's own score: of equal scores
    the older token goes first, or with ties="unpooled" the one of the lower score before pooling, so that a peak never
    goes before its neighbours. Decode appends as in the paper; with decode="evict" it holds the budget by
    the attention accumulated since the end of the prompt. A prompt that is read in chunks has an observation window at
    each chunk's end, and neighbours are those that are still held.
    """

    window: int = whole(32, least=1, protects="last")
    pool: int = whole(7, least=1, odd=True)
    ties: str = choice("older", "unpooled")
    decode: Decode = "append"

    reads_attention = True
    pick = "one picked token"

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(self.window),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.observed_scores(record.observed)

    def observed_scores(self, observed: Mapping[Observation, Tensor]) -> Tensor:
        seen = observed[LastQueries(self.window)].mean(2).sum(-2)  # [B, Hkv, T]
        before = seen[..., : max(0, seen.shape[-1] - self.window)]
        if before.shape[-1] == 0:
            return seen
        pooled = max_pool1d(before, self.pool, stride=1, padding=self.pool // 2)  # pads with -inf: not counted
        if self.ties == "unpooled":
            # Less than the distance between two float32 numbers: only equal pooled scores change their order.
            pooled, seen = pooled.double() + before.double() * 2**-26, seen.double()
        return torch.cat([pooled, seen[..., before.shape[-1] :]], dim=-1)

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return scores + probabilities.mean(2).sum(-2)
