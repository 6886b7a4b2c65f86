"""Which tokens of a prompt a layer keeps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.plan import LayerPlan
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import NO_SCORES, keep_best, keep_best_of_heads


@dataclass(frozen=True)
class Selection:
    """The kept tokens of a prompt of T tokens, and the scores of all T.

    kept: int64 [B, Hkv, n], positions in ascending order; or, where `by_head`, bool [B, Hkv, T], each head with a
    number of tokens of its own. scores: float32 [B, Hkv, T], None where the rule keeps no scores.
    """

    kept: Tensor
    scores: Tensor | None
    by_head: bool = False


def select(record: LayerRecord, plan: LayerPlan) -> Selection:
    """The tokens with the highest priorities, `plan.budget` for each head; all where the budget holds the prompt."""
    scores = plan.rule.initial_scores(record)
    prompt, budget = record.key.shape[2], plan.budget
    position = torch.arange(prompt, device=record.key.device).expand(record.key.shape[:3])
    if budget is None or budget >= prompt:
        return Selection(position, scores)
    known = NO_SCORES if scores is None else scores
    priority = plan.rule.priority(known, position, prompt - 1, budget, record.index)
    share = plan.rule.head_tokens(priority, budget)
    if share is not None:
        return Selection(keep_best_of_heads(priority, share), scores, by_head=True)
    return Selection(keep_best(priority, budget), scores)
