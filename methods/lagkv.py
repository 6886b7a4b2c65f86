"""LagKV: each block of tokens judged by the block that follows it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, Decode, KeepRule, is_whole
from kvbench.errors import UserError


@dataclass(frozen=True)
class LagKV(KeepRule):
    """Lag-relative scores, attention-free (Liang et al., 2025, arXiv:2504.04704).

    Behind `n_sink` sinks the prompt is cut into blocks of `block` tokens. A block's keys are normalised per channel
    by the minimum and maximum of the next block's, the standard deviation over channels goes through a softmax over
    the block, likewise for values, and the mean of both ranks the block's tokens. Equal ranks in all blocks stay; the
    last block and what follows it stay whole. Decode appends.
    """

    n_sink: int = 4
    block: int = 128
    decode: Decode = "append"

    decodes: ClassVar[tuple[Decode, ...]] = ("append",)

    def __post_init__(self) -> None:
        if not is_whole(self.n_sink) or self.n_sink < 0:
            raise UserError(f"sinks={self.n_sink} for LagKV; type sinks=0 or more (the paper's is sinks=4)")
        if not is_whole(self.block) or self.block < 2:
            raise UserError(f"block={self.block} for LagKV; type 2 or more (the paper's is 128)")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        return self.n_sink + 2 * self.block

    @property
    def fixed_part(self) -> str:
        return f"{self.n_sink} sinks, the last block of {self.block} and the tokens behind it"

    def initial_scores(self, record: LayerRecord) -> Tensor:
        length = record.key.shape[2]
        scores = torch.full(record.key.shape[:3], KEEP, device=record.key.device)
        blocks = max(0, (length - self.n_sink) // self.block - 1)  # the last one has nobody to judge it
        if blocks:
            stop = self.n_sink + (blocks + 1) * self.block
            parts = (self._relative(states[:, :, self.n_sink : stop]) for states in (record.key, record.value))
            score = sum(parts, torch.zeros((), device=record.key.device)) / 2
            rank = score.argsort(dim=-1, stable=True).argsort(-1)  # equal scores: the older token ranks lower
            scores[:, :, self.n_sink : stop - self.block] = rank.flatten(2).to(torch.float32)
        return scores

    def _relative(self, states: Tensor) -> Tensor:
        """[B, Hkv, n * block, D] -> scores of all blocks but the last: [B, Hkv, n - 1, block]."""
        blocks = states.to(torch.float32).unflatten(2, (-1, self.block))
        lag, now = blocks[:, :, 1:], blocks[:, :, :-1]
        low, span = lag.amin(-2, keepdim=True), lag.amax(-2, keepdim=True) - lag.amin(-2, keepdim=True)
        relative = torch.where(span > 0, (now - low) / span, 0.0)  # a channel that does not move says nothing
        return relative.std(-1).softmax(-1)

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return scores
