"""Hindsight: keeps the tokens that the tokens to come will attend to. A bound for keep rules, not a method."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.cache.future import FutureAttention
from kvbench.cache.observe import Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, KeepRule
from kvbench.cache.rule_settings import choice


@dataclass(frozen=True)
class Hindsight(KeepRule):
    """Cheats: ranks tokens by the attention that the scored tokens give them in the full cache's own pass.

    Of all ways to keep a budget of tokens in each head it keeps the most future attention mass. So it is the ceiling
    for rules that rank by attention, and where it does not beat a real rule, attention mass is the wrong aim. With
    variant="output" each query head's mass is multiplied by ||W_o v||, what the token's value adds to the residual
    stream. No token is protected, the newest one apart. With decode="evict" decoded tokens are ranked the same way.

    mass: what each token of prompt and future will receive, float32 [B, Hkv, T + n]; set for each layer.
    """

    weigh: str = choice("attention", "output", knob="variant")
    mass: Tensor | None = field(default=None, repr=False, compare=False)

    sees_future = True

    def observations(self) -> tuple[Observation, ...]:
        return (FutureAttention(self.weigh == "output"),)

    def of_layer(self, record: LayerRecord) -> KeepRule:
        return replace(self, mass=record.observed[self.observations()[0]])

    def evictable_priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        if self.mass is None:
            raise RuntimeError("hindsight was not bound to a layer: `of_layer`")
        known = self.mass.shape[-1]
        future = self.mass.gather(-1, position.long().clamp(0, known - 1))
        return torch.where(position < known, future, KEEP)  # beyond what is known: newer than any known token
