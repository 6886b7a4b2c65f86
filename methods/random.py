"""Random eviction: the floor that a keep rule has to beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.rule import KEEP, KeepRule, is_whole
from kvbench.errors import UserError


@dataclass(frozen=True)
class Random(KeepRule):
    """Half the budget for the newest tokens, as H2O; of the rest a uniform sample stays.

    A token's worth is a hash of (seed, layer, head, position), so it does not depend on when it is asked for. Without
    the recent half it would be no floor: language models need their newest tokens more than any rule's picks.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.seed) or self.seed < 0:
            raise UserError(f"seed={self.seed} for Random; type seed=0 or another whole number")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        return 2

    @property
    def fixed_part(self) -> str:
        return "one recent token and one drawn"

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        head = torch.arange(position.shape[1], device=position.device).view(1, -1, 1)
        drawn = hashed(hashed(hashed(hashed(position.long()) ^ head) ^ layer) ^ self.seed)
        return torch.where(position > newest - budget // 2, KEEP, drawn.to(torch.float64))


def hashed(x: Tensor) -> Tensor:
    """A 31-bit mix of int64 numbers, elementwise (the lowbias32 finaliser of C. Wellons, kept to 31 bits)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF
