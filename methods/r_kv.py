"""R-KV: keeps tokens that recent queries attend to and whose keys are not repeated later."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from kvbench.cache.held import HeldTokens, held_prompt
from kvbench.cache.observe import Observation, RecentQueries
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import share, whole
from kvbench.kernels.prefill import Scoring, block_bytes


@dataclass(frozen=True)
class RKV(KeepRule):
    """Importance minus redundancy, for long reasoning (Cai et al., 2025, arXiv:2505.24133).

    New tokens fill a buffer: the cache holds budget + `buffer` tokens at most, and then evicts down to the budget. The
    newest `window` tokens stay, and of the others the best by `mix_lambda` * importance - (1 - `mix_lambda`) *
    redundancy. The prompt is cut the same way.

    Importance: the scores that the newest `window` queries give the tokens before the window, the largest over the
    query heads of a KV head, go through a softmax over these tokens; their mean over queries is max-pooled over `pool`
    neighbouring tokens. Redundancy: the mean cosine of a token's key and the keys of all tokens held, through a
    softmax. For each key two of its cosines count as 0: with itself, and with the newest of the keys that are similar
    to it (cosine above `threshold`). So the newest of similar tokens is not redundant.

    Follows the authors' repository, with the paper's `mix_lambda` of 0.1 (the repository has 0.07). One difference: for
    a key without similar ones the repository leaves out its cosine with the oldest token instead.
    """

    window: int = whole(8, least=1, protects="last")
    pool: int = whole(7, least=1, odd=True)
    mix_lambda: float = share(0.1)
    threshold: float = share(0.5)
    buffer: int = whole(128, least=1)

    pick = "one picked token"

    @property
    def evicts_every(self) -> int:
        return self.buffer

    def observations(self) -> tuple[Observation, ...]:
        return (RecentQueries(self.window),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.scores_at_eviction(held_prompt(record, self.observations()))

    def scores_at_eviction(self, held: HeldTokens) -> Tensor:
        scores = torch.zeros_like(held.scores)
        before = held.key.shape[2] - self.window
        if before > 0:
            important = self._importance(held.recent_query, held.key[:, :, :before], held.scoring)
            redundant = redundancy(held.key, self.threshold)[..., :before]
            scores[..., :before] = self.mix_lambda * important - (1 - self.mix_lambda) * redundant
        return scores

    def _importance(self, query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
        """[B, Hkv, n] of keys [B, Hkv, n, D], by queries [B, Hq, w, D]."""
        grouped = query.unflatten(1, (key.shape[1], -1))
        scores = scoring.scaling * (grouped @ key.unsqueeze(2).mT)
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        weight = scores.amax(2).softmax(-1).mean(-2)
        return max_pool1d(weight, self.pool, stride=1, padding=self.pool // 2)  # pads with -inf: not counted


def redundancy(key: Tensor, threshold: float) -> Tensor:
    """How much each of the keys [B, Hkv, n, D], oldest first, is repeated by the others: [B, Hkv, n], of sum 1."""
    direction, n = normalize(key, dim=-1, eps=1e-8), key.shape[2]
    total = key.new_zeros(key.shape[:3])
    column = torch.arange(n, device=key.device)
    height = max(16, block_bytes(key.device) // (4 * n * key.shape[0] * key.shape[1]))
    for start in range(0, n, height):
        cosine = direction[:, :, start : start + height] @ direction.mT
        row = column[start : start + height]
        cosine = cosine.masked_fill(column == row.unsqueeze(-1), 0)
        newest = column.where(cosine > threshold, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill(column == newest, 0).sum(-2)
    return (total / n).softmax(-1)
