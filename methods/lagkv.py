"""LagKV: scores each block of tokens relative to the next block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
    """

    n_sink: int = whole(4, least=0, knob="sinks")
    block: int = whole(128, least=2)
    decode: Decode = "append"

    decodes: ClassVar[tuple[Decode, ...]] = ("append",)

    def fixed_parts(self) -> list[tuple[int, str]]:
        sinks, last = max(self.n_sink, self.first_tokens), max(2 * self.block, self.last_tokens(0))
        return [(sinks, f"{sinks} sinks"), (last, f"the last block of {self.block} and the tokens after it")]

    def initial_scores(self, record: LayerRecord) -> Tensor:
        length = record.key.shape[2]
        scores = torch.full(record.key.shape[:3], KEEP, device=record.key.device)
        blocks = max(0, (length - self.n_sink) // self.block - 1)  # no block follows the last one
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
        relative = torch.where(span > 0, (now - low) / span, 0.0)  # a constant channel counts as 0
        return relative.std(-1).softmax(-1)
