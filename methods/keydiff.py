"""KeyDiff: keys whose direction differs from the mean direction stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule


@dataclass(frozen=True)
class KeyDiff(KeepRule):
    """Scores -cos(k, mean of k / ||k||), once at the end of the prompt (Park et al., 2025, arXiv:2504.15364).

    The mean runs over the prompt's keys, so decode appends: the cache grows past the budget. The newest token stays.
    """

    decode: Decode = "append"

    decodes: ClassVar[tuple[Decode, ...]] = ("append",)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        key = record.key.to(torch.float32)
        return -cosine_similarity(key, normalize(key, dim=-1).mean(2, keepdim=True), dim=-1)
