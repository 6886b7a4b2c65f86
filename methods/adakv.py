"""AdaKV: moves budget between the heads of a layer."""

from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.cache.observe import Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, KeepRule, keep_best_of_heads
from kvbench.cache.rule_settings import choice
from kvbench.errors import UserError


@dataclass(frozen=True)
class AdaKV(KeepRule):
    """Another rule's scores with a budget per head (Feng et al., 2024, arXiv:2407.11550).

    B is the budget of a layer. With allocation="floor", as in kvpress, each KV head keeps its best floor(`floor` * B)
    tokens, protected ones included. The rest of Hkv * B goes to the best tokens over all heads of the layer, by the
    inner rule's priorities. With allocation="blend", as in the authors' repository, a head's budget is
    w + (1 - `floor`) * count + `floor` * (B - w): w tokens of a head are protected, and count is its number among the
    best Hkv * (B - w) others of the layer. It is rounded so that the sum is Hkv * B.

    Of equal priorities the older token is evicted first, and at the same position the token of the lower head. The
    budgets per head are fixed at the end of the prompt; where decode evicts, each head holds its own. A prompt that
    fits the budget leaves all heads B. Heads hold blocks of a pool, as many as they need, so memory follows their
    budgets.
    """

    inner: KeepRule = field(kw_only=True)
    floor: float = 0.2
    allocation: str = choice("floor", "blend", knob="allocation")

    reads_attention = True
    ragged_heads = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", self._with_protection(self.inner))
        super().__post_init__()
        if self.inner.budget != self.budget:
            found = "takes none" if self.inner.budget is None else f"has another, {self.inner.budget}"
            raise UserError(
                f"AdaKV moves its budget={self.budget} between the heads of a rule, and {self.inner.name} "
                f"{found}; type inner=snapkv, for example"
            )
        if not isinstance(self.floor, int | float) or not 0 <= self.floor <= 1:
            raise UserError(f"floor={self.floor} for AdaKV; type a share from 0 to 1 (the default is 0.2)")
        if self.inner.merges or self.inner.calibrates:
            raise UserError(f"AdaKV cannot move the budget of {self.inner.name} between heads; type inner=snapkv")
        if self.inner.holds_budget and (self.inner.rescores or self.inner.evicts_every > 1):
            raise UserError(
                f"AdaKV with {self.inner.name} and decode=evict: heads of different lengths are not scored anew or "
                "evicted in blocks; type decode=append"
            )
        if self.inner.sinks_in_place:
            raise UserError(
                f"AdaKV with {self.inner.name}: heads that have evicted differently have no common "
                "positions inside the cache; type variant=absolute"
            )

    def _with_protection(self, inner: KeepRule) -> KeepRule:
        """The inner rule, which protects the tokens that this one is told to protect."""
        first = inner.protect_first if self.protect_first is None else self.protect_first
        last = inner.protect_last if self.protect_last is None else self.protect_last
        return replace(inner, protect_first=first, protect_last=last)

    def fixed_parts(self) -> list[tuple[int, str]]:
        return self.inner.fixed_parts()

    @property
    def holds_budget(self) -> bool:
        return self.inner.holds_budget

    def head_tokens(self, priority: Tensor, budget: int) -> Tensor:
        return self._blended(priority, budget) if self.allocation == "blend" else self._with_floor(priority, budget)

    def _blended(self, priority: Tensor, budget: int) -> Tensor:
        """Each head's protected tokens, and a blend of its share of the best others and of an equal share."""
        heads = priority.shape[1]
        protected = (priority == KEEP).sum(-1)  # [B, Hkv]
        picks = heads * budget - protected.sum(-1, keepdim=True)  # [B, 1], over all heads
        count = self._best_over_heads(priority, heads * budget) - protected
        wanted = (1 - self.floor) * count + self.floor * picks / heads
        whole_part = wanted.floor()
        order = (wanted - whole_part).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return protected + (whole_part + (order < picks - whole_part.sum(-1, keepdim=True))).long()

    def _best_over_heads(self, priority: Tensor, total: int) -> Tensor:
        """How many of a layer's `total` best tokens each head has: int64 [B, Hkv]."""
        batch, heads, prompt = priority.shape
        order = priority.transpose(1, 2).flatten(1).sort(dim=-1, stable=True).indices  # by position, then by head
        best = order[:, heads * prompt - total :] % heads
        return torch.zeros(batch, heads, dtype=torch.int64, device=priority.device).scatter_add_(
            1, best, torch.ones_like(best)
        )

    def _with_floor(self, priority: Tensor, budget: int) -> Tensor:
        batch, heads, _ = priority.shape
        own = torch.full((batch, heads), int(Fraction(str(self.floor)) * budget), device=priority.device)
        with_floor = priority.masked_fill(keep_best_of_heads(priority, own), KEEP)
        return self._best_over_heads(with_floor, heads * budget)

    def layer_tokens(self, prompt: int, layer: int, n_layers: int) -> int | None:
        return self.inner.layer_tokens(prompt, layer, n_layers)

    def observations(self) -> tuple[Observation, ...]:
        return self.inner.observations()

    def initial_scores(self, record: LayerRecord) -> Tensor | None:
        return self.inner.initial_scores(record)

    def fresh_scores(self, key: Tensor, value: Tensor) -> Tensor | float:
        return self.inner.fresh_scores(key, value)

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return self.inner.updated_scores(scores, probabilities)

    def evictable_priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return self.inner.priority(scores, position, newest, budget, layer)
