"""Random eviction: the floor that every other rule must beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import whole


@dataclass(frozen=True)
class Random(KeepRule):
    """Keeps the first `n_sink` tokens, the `recent` newest ones, and a uniform sample of the others.

    `recent` is half the budget after the sinks unless given. A token's priority is a hash of (seed, layer, head,
    position), so it never changes. Sinks and newest tokens are protected because most rules keep both: so the floor
    shows what a rule's scores are worth, not what it gains by keeping sinks.
    """

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    recent: int | None = whole(None, least=1, knob="window", protects="last")
    seed: int = whole(0, least=0)

    recent_half = True
    pick = "one random token"

    def evictable_priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return drawn(position, layer, self.seed).to(torch.float64)


def drawn(position: Tensor, layer: int, seed: int) -> Tensor:
    """31-bit random numbers for the tokens in each slot: int64 [B, Hkv, S], a hash of (seed, layer, head, position)."""
    head = torch.arange(position.shape[1], device=position.device).view(1, -1, 1)
    return hashed(hashed(hashed(hashed(position.long()) ^ head) ^ layer) ^ seed)


def hashed(x: Tensor) -> Tensor:
    """A 31-bit mix of int64 numbers, elementwise (the lowbias32 finaliser of C. Wellons, kept to 31 bits)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF
