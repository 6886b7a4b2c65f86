"""What a rule asks a prefill to observe, for layers that are built without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.cache.future import FutureAttention
from kvbench.cache.observe import Observation
from kvbench.cache.rule import KeepRule
from kvbench.kernels.prefill import Scoring

TOKENS_AFTER = 600
"""Tokens of a future, at most as many as a test feeds."""


def observed_of(
    rule: KeepRule, query: Tensor, key: Tensor, scoring: Scoring, rotation: Any = None
) -> dict[Any, Tensor]:
    """Each observation computed from the prompt's queries and keys; drawn at random where it needs a model."""
    return {one: _observed(one, query, key, scoring, rotation) for one in rule.observations()}


def _observed(one: Observation, query: Tensor, key: Tensor, scoring: Scoring, rotation: Any) -> Tensor:
    batch, kv_heads, tokens, _ = key.shape
    generator = torch.Generator().manual_seed(tokens)
    if isinstance(one, FutureAttention):
        return torch.rand(batch, kv_heads, tokens + TOKENS_AFTER, generator=generator)
    if not one.from_prompt:
        return torch.rand(batch, kv_heads, query.shape[1] // kv_heads, tokens, generator=generator)
    return one.compute(query, key, scoring, rotation)
