"""Which tokens stay in the cache. A keep rule gives every slot a priority; the engine evicts the lowest priorities."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.cache.merge import Evicted, Merge
from kvbench.cache.observe import Observation
from kvbench.cache.ranking import EMPTY as EMPTY
from kvbench.cache.ranking import KEEP as KEEP
from kvbench.cache.ranking import keep_best as keep_best
from kvbench.cache.ranking import keep_best_of_heads as keep_best_of_heads
from kvbench.cache.ranking import lowest as lowest
from kvbench.cache.rule_settings import Whole, check_budget, check_settings, protected_counts
from kvbench.cache.rule_settings import is_whole as is_whole
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.cache.held import HeldTokens
    from kvbench.cache.record import LayerRecord, PrefillRecord

Budget = int | float | None

NO_SCORES = torch.empty(0)
"""What `priority` gets as scores from a rule that keeps no scores."""

Decode = Literal["append", "evict"]
"""Whether decode lets the cache grow after the prompt was cut ("append"), or holds the budget ("evict")."""


@dataclass(frozen=True)
class KeepRule:
    """Keeps every token, and is the base class of the rules that evict.

    A rule that evicts by scores overrides `initial_scores` (scores of the prompt's tokens) and, as needed,
    `observations`, `fresh_scores` and `updated_scores`. A rule that evicts by position overrides
    `evictable_priority`. The base checks the settings and protects tokens: declare a setting with `whole` or `choice`
    (`kvbench.cache.rule_settings`), and with `protects="first"` or `"last"` where it is a number of first or last
    tokens that always stay.

    Args:
        budget: tokens kept between steps per KV head: an integer >= 1, or a share of the prompt strictly between 0
            and 1, rounded up. None keeps all.
        decode: "evict" holds the budget after every step; "append" cuts the prompt only, and the cache grows after it.
        protect_first, protect_last: numbers of first and last tokens that are never evicted, whatever the rule says.
            None: only the tokens that the rule itself protects.

    Raises UserError for a setting that is not allowed, and for a budget below `smallest_budget`.
    """

    budget: Budget = None
    decode: Decode = "evict"
    protect_first: int | None = field(default=None, kw_only=True, metadata={"setting": Whole(0, protects="first")})
    protect_last: int | None = field(default=None, kw_only=True, metadata={"setting": Whole(0, protects="last")})

    needs_ids: ClassVar[bool] = False
    """Whether the rule keeps no keys at all and runs the whole prefix every step."""
    needs_budget: ClassVar[bool] = True
    decodes: ClassVar[tuple[Decode, ...]] = ("evict", "append")
    """Allowed values of `decode`. A rule whose scores need the whole prompt cannot evict during decode."""
    reads_attention: ClassVar[bool] = False
    """Whether `updated_scores` needs each step's attention probabilities."""
    needs_host: ClassVar[bool] = False
    """Whether `scores_at_eviction` reads numbers on the host, so that no decode step can be captured."""
    ragged_heads: ClassVar[bool] = False
    """Whether the heads of a layer may keep different numbers of tokens; see `head_tokens`."""
    recent_half: ClassVar[bool] = False
    """Whether half of the budget after the protected first tokens goes to the newest tokens, unless a setting gives
    their number."""
    sees_future: ClassVar[bool] = False
    """Whether the rule knows the tokens to come: a bound for real rules, never a recommendation."""
    calibrates: ClassVar[bool] = False
    """Whether the rule needs to know first which heads retrieve: see `kvbench.cache.retrieval`."""
    merges: ClassVar[bool] = False
    """Whether evicted tokens are merged into kept ones, as `merge` says."""
    carries: ClassVar[int] = 0
    """How many numbers a head carries from one `merge` to the next."""
    pick: ClassVar[str | None] = None
    """Name of the one evictable token that the smallest budget has room for; None: protected tokens suffice."""

    def __post_init__(self) -> None:
        check_settings(self, self.name)
        if self.decode not in self.decodes:
            choices = " or ".join(f"decode={choice}" for choice in self.decodes)
            raise UserError(f"decode={self.decode} for {self.name}; type {choices} (append: the cache grows)")
        self._check_protection()
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

    def _check_protection(self) -> None:
        """Raise UserError where `protect_first` or `protect_last` is set and the rule's own `priority` ignores it."""
        if type(self).priority is KeepRule.priority:
            return
        for knob, count in (("protect_first", self.protect_first), ("protect_last", self.protect_last)):
            if count:
                raise UserError(
                    f"{knob}={count} for {self.name}, which overrides `priority` and so protects no tokens for it; "
                    f"leave {knob} out, or override `evictable_priority` instead"
                )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def keeps_scores(self) -> bool:
        """Whether the rule decides by scores."""
        return type(self).initial_scores is not KeepRule.initial_scores

    @cached_property
    def first_tokens(self) -> int:
        """Number of first tokens that are never evicted."""
        return max(protected_counts(self, "first").values(), default=0)

    @cached_property
    def _last_counts(self) -> dict[str, int]:
        return protected_counts(self, "last")

    def last_tokens(self, budget: int) -> int:
        """Number of newest tokens that are never evicted at a budget in tokens: 1 or more."""
        counts, half = self._last_counts, 0
        if self.recent_half and not counts.keys() - {"protect_last"}:
            half = (budget - self.first_tokens) // 2
        return max(1, half, *counts.values())

    def fixed_parts(self) -> list[tuple[int, str]]:
        """The tokens that the rule cannot do without: numbers of tokens, each with its name."""
        first, last = self.first_tokens, self.last_tokens(0)
        parts = [(first, f"{first} sinks"), (last, "the newest token" if last == 1 else f"the {last} newest tokens")]
        return [part for part in [*parts, (1, self.pick or "")] if part[0] and part[1]]

    @property
    def smallest_budget(self) -> int:
        """Number of tokens that the rule cannot do without."""
        return sum(count for count, _ in self.fixed_parts())

    @property
    def fixed_part(self) -> str:
        """The tokens that `smallest_budget` counts, in words."""
        *others, last = (words for _, words in self.fixed_parts())
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def holds_budget(self) -> bool:
        """Whether decode evicts to hold the budget; else only the prompt is cut, and decode appends."""
        return self.decode == "evict"

    @property
    def merges_prompt(self) -> bool:
        """Whether tokens that the prompt's own cut evicts are merged too, in a rule that `merges`."""
        return True

    @property
    def evicts_every(self) -> int:
        """Tokens that a decode which evicts takes in between two evictions: it holds the budget and, before it evicts,
        so many tokens more."""
        return 1

    @property
    def rescores(self) -> bool:
        """Whether the rule scores all tokens anew when decode evicts: see `scores_at_eviction`."""
        return type(self).scores_at_eviction is not KeepRule.scores_at_eviction

    @property
    def sinks_in_place(self) -> int:
        """Number of first tokens whose distance to the query is counted inside the cache; 0: original positions."""
        return 0

    def tokens(self, prompt: int) -> int | None:
        """The budget in tokens for a prompt of that length; None keeps all.

        Raises UserError where a share of this prompt is below `smallest_budget`.
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
        """The budget of one layer in tokens; the same in all layers unless a rule moves budget between them.

        layer: index among the `n_layers` layers that the rule applies to; sliding-window layers do not count.
        """
        return self.tokens(prompt)

    def head_tokens(self, priority: Tensor, budget: int) -> Tensor | None:
        """Numbers of prompt tokens that each head keeps: int64 [B, Hkv], with a mean of `budget`; None: all `budget`.

        No head may keep more than T tokens, or fewer than it has priorities of `KEEP`.

        priority: [B, Hkv, T] with T > budget.
        """
        return None

    def growing_heads(self) -> Tensor | None:
        """Which heads of a layer keep every new token while the others evict: bool [Hkv]; None: no head."""
        return None

    def calibrated(self, retrieval: dict[int, Tensor]) -> "KeepRule":
        """The rule with each head's retrieval, float32 [Hkv] by layer; only called where it `calibrates`."""
        raise TypeError(f"{self.name} takes no calibration")

    def for_tokenizer(self, tokenizer: Any) -> "KeepRule":
        """The rule for a model with this tokenizer (None: it has none): itself, unless it feeds words of its own."""
        return self

    def of_prompt(self, record: "PrefillRecord") -> "KeepRule":
        """The rule as it decides for one batch of prompts: itself, unless layers decide together."""
        return self

    def of_layer(self, record: "LayerRecord") -> "KeepRule":
        """The rule as it decides in one layer of a prompt: itself, unless it needs more of the record than scores."""
        return self

    def observations(self) -> tuple[Observation, ...]:
        """What the rule wants recorded during prefill."""
        return ()

    def initial_scores(self, record: "LayerRecord") -> Tensor | None:
        """Scores of the prompt's tokens, float32 [B, Hkv, T]; None where the rule keeps no scores."""
        return None

    def observed_scores(self, observed: Mapping[Observation, Tensor]) -> Tensor | None:
        """Scores from the observations alone: float32 [B, Hkv, T]; None where they do not suffice.

        A rule that overrides it can read a prompt in chunks: at each chunk's end it scores all T tokens that are held,
        in order of position, by what the chunk's last queries observe.
        """
        return None

    def fresh_scores(self, key: Tensor, value: Tensor) -> Tensor | float:
        """Scores of new tokens before any query has attended to them: float32 [B, Hkv, q], or 0.

        key: [B, Hkv, q, D]. value: [B, Hkv, q, Dv].
        """
        return 0.0

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        """Scores after a step: float32 [B, Hkv, S] from probabilities [B, Hkv, Hq / Hkv, q, S]."""
        return scores

    def merge(self, evicted: Evicted) -> Merge:
        """Where the keys and values of evicted tokens go; called after each decision of a rule that `merges`."""
        raise TypeError(f"{self.name} does not define `merge`")

    def scores_at_eviction(self, held: "HeldTokens") -> Tensor:
        """Scores of the tokens held, float32 [B, Hkv, n], before each eviction of decode; the layer keeps them.

        For rules that decide by the keys, values or last queries of that moment. Called where a rule overrides it,
        which needs `initial_scores` as well.
        """
        return held.scores

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        """Priority of each slot's token: `KEEP` for protected tokens, `evictable_priority` for the others.

        Of equal priorities the older token is evicted first.

        Args:
            scores: float32 [B, Hkv, S], or `NO_SCORES` where the rule has no `initial_scores`.
            position: [B, Hkv, S], the position of the token in each slot; the engine excludes EMPTY slots.
            newest: position of the newest token. In a CUDA graph it is a number on the device (int64 []), so compute
                with it and do not branch on it.
            budget: in tokens.
            layer: index.

        Returns:
            float32 or float64 [B, Hkv, S].
        """
        protected = position > newest - self.last_tokens(budget)
        if self.first_tokens:
            protected = protected | (position < self.first_tokens)
        return torch.where(protected, KEEP, self.evictable_priority(scores, position, newest, budget, layer))

    def evictable_priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        """Priority of tokens that are not protected: their score, or their position in a rule that keeps no scores.

        Arguments as in `priority`; values for protected tokens are ignored. Raises UserError where scores are missing.
        """
        if not self.keeps_scores:
            return position.to(torch.float64)
        if scores.shape[-1:] != position.shape[-1:]:
            raise UserError(
                f"{self.name} evicts by scores and got {tuple(scores.shape)} for {tuple(position.shape)} slots; "
                "return float32 scores [B, Hkv, T] from `initial_scores` for every layer"
            )
        return scores


@dataclass(frozen=True)
class SlidingWindow(KeepRule):
    """Keeps the last `budget` tokens: all that a model's own sliding-window layer needs between steps."""
