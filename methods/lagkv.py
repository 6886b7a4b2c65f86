"""LagKV: scores each block of tokens relative to the next block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.held import HeldTokens
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, Decode, KeepRule
from kvbench.cache.rule_settings import whole


@dataclass(frozen=True)
class LagKV(KeepRule):
    """Lag-relative scores, attention-free (Liang et al., 2025, arXiv:2504.04704).

    After `n_sink` sinks the prompt is cut into blocks of `block` tokens. A block's keys are normalised per channel by
    the minimum and maximum of the next block's keys. The standard deviation over channels goes through a softmax over
    the block. The same is done for values, and the mean of both ranks the block's tokens. The score is the rank within
    the block. The sinks, the last block and the tokens after it always stay. Decode appends. Defaults are those of
    kvpress; the authors' repository has 16 sinks and blocks of 1,024.

    The paper goes on in the same way while decoding: a block is ranked once, as soon as the next block is full. It
    keeps a fixed share of each block, so its cache grows. With decode="evict" the budget holds instead: every `block`
    tokens the new blocks are ranked and the lowest ranks of all blocks are evicted, so each block keeps an equal share.
    """

    n_sink: int = whole(4, least=0, knob="sinks")
    block: int = whole(128, least=2)
    decode: Decode = "append"

    needs_host = True

    @property
    def evicts_every(self) -> int:
        return self.block

    def fixed_parts(self) -> list[tuple[int, str]]:
        sinks, last = max(self.n_sink, self.first_tokens), max(2 * self.block, self.last_tokens(0))
        return [(sinks, f"{sinks} sinks"), (last, f"the last block of {self.block} and the tokens after it")]

    def initial_scores(self, record: LayerRecord) -> Tensor:
        scores = torch.full(record.key.shape[:3], KEEP, device=record.key.device)
        return self._ranked(scores, record.key, record.value, self.n_sink)

    def fresh_scores(self, key: Tensor, value: Tensor) -> float:
        return KEEP

    def scores_at_eviction(self, held: HeldTokens) -> Tensor:
        # Tokens that no rank has been given yet are the newest ones of every head, from the start of a block on.
        waiting = int((held.scores[0, 0, self.n_sink :] == KEEP).sum())
        return self._ranked(held.scores.clone(), held.key, held.value, held.key.shape[2] - waiting)

    def _ranked(self, scores: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """The scores [B, Hkv, T] with ranks for every block from `start` on that a full block follows."""
        blocks = max(0, (key.shape[2] - start) // self.block - 1)
        if blocks:
            stop = start + (blocks + 1) * self.block
            parts = (self._relative(states[:, :, start:stop]) for states in (key, value))
            score = sum(parts, torch.zeros((), device=key.device)) / 2
            rank = score.argsort(dim=-1, stable=True).argsort(-1)  # equal scores: the older token ranks lower
            scores[:, :, start : stop - self.block] = rank.flatten(2).to(torch.float32)
        return scores

    def _relative(self, states: Tensor) -> Tensor:
        """[B, Hkv, n * block, D] -> scores of all blocks but the last: [B, Hkv, n - 1, block]."""
        blocks = states.to(torch.float32).unflatten(2, (-1, self.block))
        lag, now = blocks[:, :, 1:], blocks[:, :, :-1]
        low, span = lag.amin(-2, keepdim=True), lag.amax(-2, keepdim=True) - lag.amin(-2, keepdim=True)
        relative = torch.where(span > 0, (now - low) / span, 0.0)  # a constant channel counts as 0
        return relative.std(-1).softmax(-1)
