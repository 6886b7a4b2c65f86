"""Which tokens stay. A keep rule gives every slot a priority; the engine evicts the lowest."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal, TypeGuard

import torch
from torch import Tensor

from kvbench.cache.observe import Observation
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.cache.record import LayerRecord

EMPTY = -1
"""`position` of a slot that holds no token."""

KEEP = math.inf
"""Priority of a token that must not be evicted."""

Budget = int | float | None

NO_SCORES = torch.empty(0)
"""What `priority` is given for scores where a rule keeps none."""

Decode = Literal["append", "evict"]
"""Whether decode lets the cache grow behind a prompt that was cut, or holds the budget."""


@dataclass(frozen=True)
class KeepRule:
    """Keeps everything, and is what the other rules refine.

    `budget`: tokens kept between steps per KV head; an integer >= 1, or a share of the prompt strictly between 0 and
    1, rounded up; None keeps all. `decode`: "evict" holds the budget after every step; "append" cuts the prompt only,
    and the cache grows behind it. A rule overrides `priority`, and where its decision rests on scores also
    `initial_scores`, with `observations`, `fresh_scores` and `updated_scores` as it needs them.
    """

    budget: Budget = None
    decode: Decode = "evict"

    needs_ids: ClassVar[bool] = False
    """Keeps no keys at all and runs the whole prefix every step."""
    needs_budget: ClassVar[bool] = True
    decodes: ClassVar[tuple[Decode, ...]] = ("evict", "append")
    """What `decode` may be: a rule whose scores only a whole prompt can give has nothing to evict by later."""
    reads_attention: ClassVar[bool] = False
    """Whether `updated_scores` wants each step's probabilities."""
    ragged_heads: ClassVar[bool] = False
    """Whether the heads of a layer may keep different numbers of tokens; see `head_tokens`."""

    def __post_init__(self) -> None:
        if self.decode not in self.decodes:
            choices = " or ".join(f"decode={choice}" for choice in self.decodes)
            raise UserError(f"decode={self.decode} for {self.name}; type {choices} (append: the cache grows)")
        if self.budget is None:
            if self.needs_budget:
                raise UserError(
                    f"{self.name} needs a budget: type budget=256 (tokens per KV head) or budget=0.25 (of the prompt)"
                )
            return
        check_budget(self.budget)
        if not self.needs_budget:
            raise UserError(f"{self.name} takes no budget, and budget={self.budget} was given; leave budget= out")
        if isinstance(self.budget, int) and self.budget < self.smallest_budget:
            raise UserError(
                f"budget={self.budget} is below the {self.smallest_budget} tokens that {self.name} always keeps "
                f"({self.fixed_part}); type budget={self.smallest_budget} or more"
            )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def smallest_budget(self) -> int:
        """Tokens that the rule cannot do without."""
        return 1

    @property
    def fixed_part(self) -> str:
        """What `smallest_budget` is made of, in words."""
        return "the newest token"

    @property
    def holds_budget(self) -> bool:
        """Whether the budget is held during decode by evicting; else it cuts the prompt, and decode appends."""
        return self.decode == "evict"

    @property
    def sinks_in_place(self) -> int:
        """Number of first tokens whose distance to the query is counted inside the cache; 0: original positions."""
        return 0

    def tokens(self, prompt: int) -> int | None:
        """The budget in tokens for a prompt of that length; None keeps all.

        Raises UserError where a share of this prompt is less than the rule's fixed part.
        """
        if self.budget is None:
            return None
        if isinstance(self.budget, int):
            return self.budget
        tokens = math.ceil(Fraction(str(self.budget)) * prompt)
        if tokens < self.smallest_budget:
            raise UserError(
                f"budget={self.budget} of a {prompt}-token prompt is {tokens} tokens, below the "
                f"{self.smallest_budget} that {self.name} always keeps ({self.fixed_part}); "
                f"type budget={self.smallest_budget} or more"
            )
        return tokens

    def layer_tokens(self, prompt: int, layer: int, n_layers: int) -> int | None:
        """The budget of one layer; the same in all unless a rule moves budget between them.

        layer: which of the `n_layers` layers that the rule applies to; those with a window of their own do not count.
        """
        return self.tokens(prompt)

    def head_tokens(self, priority: Tensor, budget: int) -> Tensor | None:
        """How many of a prompt's tokens each head keeps, `budget` on average: int64 [B, Hkv] from priority [B, Hkv, T]
        with T > budget; None: `budget` in all. No more than T, and no fewer than priorities of `KEEP`."""
        return None

    def observations(self) -> tuple[Observation, ...]:
        """What the rule wants recorded during prefill."""
        return ()

    def initial_scores(self, record: "LayerRecord") -> Tensor | None:
        """Scores of the prompt's tokens, float32 [B, Hkv, T]; None where the rule keeps no scores."""
        return None

    def fresh_scores(self, key: Tensor) -> Tensor | float:
        """Scores of new tokens before any query has seen them: float32 [B, Hkv, q] from keys [B, Hkv, q, D], or 0."""
        return 0.0

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        """Scores after a step: float32 [B, Hkv, S] from probabilities [B, Hkv, Hq / Hkv, q, S]."""
        return scores

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        """How much each slot's token is worth keeping: float32 or float64 [B, Hkv, S]; `KEEP` is never evicted.

        Args:
            scores: float32 [B, Hkv, S], or `NO_SCORES` where the rule has no `initial_scores`. position: [B, Hkv, S],
                the token in each slot; EMPTY slots are excluded by the engine. newest: position of the newest token;
                where a step is captured in a CUDA graph a number on the device (int64 []), so compute with it and do
                not branch on it. budget: in tokens. layer: index.
        """
        return position.to(torch.float64)


@dataclass(frozen=True)
class SlidingWindow(KeepRule):
    """The last `budget` tokens: what a model's own sliding-window layer needs between steps."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a knob's value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_budget(budget: object) -> None:
    """Raise UserError unless `budget` is an integer >= 1 or a number strictly between 0 and 1."""
    if (is_whole(budget) and budget >= 1) or (isinstance(budget, float) and 0 < budget < 1):
        return
    raise UserError(
        f"budget={budget} is not a budget; type a whole number of tokens (budget=256) "
        f"or a share of the prompt strictly between 0 and 1 (budget=0.25)"
    )


def keep_best(priority: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest priorities of a prompt, in order of position: [B, Hkv, count].

    Ties give up the older token: the sort is stable, so of equals the earlier ones come first and are cut.
    """
    order = priority.sort(dim=-1, stable=True).indices
    return order[..., priority.shape[-1] - count :].sort(-1).values


def keep_best_of_heads(priority: Tensor, count: Tensor) -> Tensor:
    """The highest priorities of each head, count [B, Hkv] of them: bool [B, Hkv, T]. Ties as in `keep_best`."""
    rank = priority.sort(dim=-1, stable=True).indices.argsort(-1)
    return rank >= priority.shape[-1] - count.unsqueeze(-1)


def lowest(priority: Tensor, position: Tensor, count: int) -> Tensor:
    """Slots of the `count` lowest priorities among occupied slots: [B, Hkv, count]. Ties give up the older token."""
    never = torch.iinfo(position.dtype).max
    worth = priority.masked_fill(position == EMPTY, KEEP)
    victims = []
    for _ in range(count):
        is_lowest = worth == worth.amin(-1, keepdim=True)
        victim = position.masked_fill(~is_lowest | (position == EMPTY), never).argmin(-1, keepdim=True)
        victims.append(victim)
        worth = worth.scatter(-1, victim, KEEP)
        position = position.scatter(-1, victim, EMPTY)
    return torch.cat(victims, -1)
