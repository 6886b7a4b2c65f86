"""CriticalKV: half of the budget by attention, half by attention times what a value adds to the residual stream."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.output_norms import OutputNorms
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule, keep_best_of_heads
from kvbench.cache.rule_settings import whole


@dataclass(frozen=True)
class Critical(KeepRule):
    """Bounds the change of the attention output (Feng et al., 2025, arXiv:2502.03805).

    The observation window scores tokens as SnapKV does, by mean probability. Stage 1 keeps the window and the best
    tokens by that score, with the share `first_stage` of the rest of the budget. Stage 2 keeps, of the others, the best
    by (score + 1e-4) ||W_o v||_1, the norm averaged over the query heads of a KV head; 1e-4 is the authors' code's.
    Where all norms are equal the choice is SnapKV's. Decode appends.
    """

    window: int = whole(32, least=1, protects="last")
    pool: int = whole(7, least=1, odd=True)
    first_stage: float = 0.5
    decode: Decode = "append"

    decodes = ("append",)
    pick = "one picked token"

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(self.window), OutputNorms(1))

    def initial_scores(self, record: LayerRecord) -> Tensor:
        seen = record.observed[LastQueries(self.window)].mean(2).mean(-2)  # [B, Hkv, T]
        before = max(0, seen.shape[-1] - self.window)
        if before:
            seen[..., :before] = max_pool1d(seen[..., :before], self.pool, stride=1, padding=self.pool // 2)
        budget = self.tokens(seen.shape[-1])
        norms = record.observed[OutputNorms(1)].mean(2)
        weighted = (seen + 1e-4) * norms
        if budget is None or budget >= seen.shape[-1]:
            return weighted
        protected = self.first_tokens + self.last_tokens(budget)
        share = torch.full(seen.shape[:2], int(self.first_stage * (budget - protected)), device=seen.device)
        first = keep_best_of_heads(seen[..., :before], share)
        weighted[..., :before] += first * (weighted.amax(-1, keepdim=True) + 1)
        return weighted
