"""Key norm: keys of small norm receive much attention, so they stay."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import whole


@dataclass(frozen=True)
class KNorm(KeepRule):
    """Keeps the keys with the lowest L2 norm (Devoto et al., 2024, arXiv:2406.11430): score -||k||.

    No attention is computed. The newest token stays, which changes much: the original evicts by norm alone. The
    `skip_layers` first layers keep every token; the authors' repository skips layers 0 and 1, and kvbench none.
    """

    skip_layers: int = whole(0, least=0)

    def layer_tokens(self, prompt: int, layer: int, n_layers: int) -> int | None:
        return None if layer < self.skip_layers else self.tokens(prompt)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.fresh_scores(record.key, record.value)

    def fresh_scores(self, key: Tensor, value: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(key.to(torch.float32), dim=-1)
        return -norm
