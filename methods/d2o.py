"""D2O: merges keys and values of evicted tokens into the most similar kept tokens."""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from kvbench.cache.merge import Evicted, Merge
from kvbench.cache.rule_settings import whole
from kvbench.errors import UserError
from kvbench.methods.h2o import H2O

BLOCK = 1024
"""Evicted tokens whose similarities are computed at once."""


@dataclass(frozen=True)
class D2O(H2O):
    """H2O with sinks, whose evicted tokens are merged (Wan et al., 2025, arXiv:2406.13035).

    Each evicted token looks for the kept token of its KV head whose key has the largest cosine similarity u. It is
    merged where u is at least the head's threshold: the mean u of the tokens evicted from the prompt, and then at each
    step the threshold becomes (1 - ema) * threshold + ema * u. A kept key, and likewise its value, becomes the mean of
    itself, of weight e, and of the keys merged into it, each of weight exp(u).

    The weights are the paper's; the authors' code (github.com/AIoT-MLSys-Lab/D2O) averages the kept key and u times the
    evicted ones. `ema` = 0.5 and 4 sinks are the code's. The code decides for all heads of a layer together, here each
    KV head decides for itself. All layers have the same budget: the paper also gives layers of dense attention more,
    by the variance of the prompt's attention, and the code leaves the first two layers and the last one whole.
    """

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    ema: float = 0.5

    merges = True
    carries = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ema, int | float) or not 0 <= self.ema <= 1:
            raise UserError(f"ema={self.ema} for {self.name}; type a share from 0 to 1 (the default is 0.5)")

    def merge(self, evicted: Evicted) -> Merge:
        keys = normalize(evicted.key, dim=-1)
        gone = keys.gather(2, evicted.victims.unsqueeze(-1).expand(*evicted.victims.shape, keys.shape[-1]))
        nearest = [
            (block @ keys.mT).masked_fill(~evicted.stays.unsqueeze(2), -math.inf).max(-1)
            for block in gone.split(BLOCK, 2)
        ]
        similarity = torch.cat([found.values for found in nearest], -1)
        into = torch.cat([found.indices for found in nearest], -1)
        mean, before = similarity.mean(-1, keepdim=True), evicted.carried
        threshold = torch.where(before.isnan(), mean, (1 - self.ema) * before + self.ema * mean)
        weight = similarity.exp() * (similarity >= threshold)
        return Merge(into.unsqueeze(-1), weight.unsqueeze(-1), own=math.e, carried=threshold.to(before.dtype))
