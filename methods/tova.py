"""TOVA: evicts the token that the newest query attends to least."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule


@dataclass(frozen=True)
class Tova(KeepRule):
    """Token omission via attention (Oren et al., 2024, arXiv:2401.06104).

    Each step evicts the kept token with the lowest probability for the newest query. The probability is averaged over
    all heads of the layer, so all heads of a layer keep the same tokens. The prompt is cut by its last query.
    """

    reads_attention = True

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(1),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.updated_scores(record.key[..., 0], record.observed[LastQueries(1)])

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        newest = probabilities[..., -1, :].mean((1, 2), keepdim=True).squeeze(2)  # [B, 1, S]
        return newest.to(torch.float32).expand(scores.shape)
