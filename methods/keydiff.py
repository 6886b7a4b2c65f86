"""KeyDiff: keys whose direction differs from the mean direction stay."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvbench.cache.held import HeldTokens
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule
from kvbench.cache.rule_settings import whole


@dataclass(frozen=True)
class KeyDiff(KeepRule):
    """Scores -cos(k, mean of k / ||k||) over the keys of a cache (Park et al., 2025, arXiv:2504.15364).

    The prompt is scored once, at its end. Decode appends, as in kvpress. The paper evicts block by block, by the mean
    over the keys that the cache holds then; with decode="evict" the decoded text is handled so, in blocks of `buffer`
    tokens: 1 holds the budget after every step. The newest token stays.
    """

    buffer: int = whole(1, least=1)
    decode: Decode = "append"

    @property
    def evicts_every(self) -> int:
        return self.buffer

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return distinctness(record.key.to(torch.float32))

    def scores_at_eviction(self, held: HeldTokens) -> Tensor:
        return distinctness(held.key)


def distinctness(key: Tensor) -> Tensor:
    """Minus the cosine of each key [B, Hkv, n, D] and the mean direction of all n: [B, Hkv, n]."""
    return -cosine_similarity(key, normalize(key, dim=-1).mean(2, keepdim=True), dim=-1)
