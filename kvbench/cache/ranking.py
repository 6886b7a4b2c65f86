"""Which tokens have the highest and the lowest priorities. Of equal priorities the older token is evicted first."""

import math

import torch
from torch import Tensor

EMPTY = -1
"""`position` of a slot that holds no token."""

KEEP = math.inf
"""Priority of a token that must not be evicted."""


def keep_best(priority: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest priorities of a prompt, in order of position: [B, Hkv, count].

    Of equal priorities the older tokens are cut: the sort is stable, so they come first.
    """
    order = priority.sort(dim=-1, stable=True).indices
    return order[..., priority.shape[-1] - count :].sort(-1).values


def keep_best_of_heads(priority: Tensor, count: Tensor) -> Tensor:
    """Which tokens have the highest priorities of their head: bool [B, Hkv, T]. Ties as in `keep_best`.

    count: number of tokens of each head, [B, Hkv].
    """
    rank = priority.sort(dim=-1, stable=True).indices.argsort(-1)
    return rank >= priority.shape[-1] - count.unsqueeze(-1)


def first_evicted(priority: Tensor, count: int) -> Tensor:
    """Indices of the `count` lowest priorities of tokens in order of position: [B, Hkv, count].

    Of equal priorities the older token is evicted: the sort is stable, so it comes first.
    """
    return priority.sort(dim=-1, stable=True).indices[..., :count]


def lowest(priority: Tensor, position: Tensor, count: int) -> Tensor:
    """Slots of the `count` lowest priorities among occupied slots: [B, Hkv, count].

    Of equal priorities the older token is evicted.
    """
    never = torch.iinfo(position.dtype).max
    remaining = priority.masked_fill(position == EMPTY, KEEP)
    victims = []
    for _ in range(count):
        is_lowest = remaining == remaining.amin(-1, keepdim=True)
        victim = position.masked_fill(~is_lowest | (position == EMPTY), never).argmin(-1, keepdim=True)
        victims.append(victim)
        remaining = remaining.scatter(-1, victim, KEEP)
        position = position.scatter(-1, victim, EMPTY)
    return torch.cat(victims, -1)


def ascending(position: Tensor) -> Tensor:
    """Positions [B, Hkv, S] in ascending order, int64, EMPTY ones last."""
    never = torch.iinfo(torch.int32).max
    ordered = position.masked_fill(position == EMPTY, never).sort(-1).values
    return ordered.masked_fill(ordered == never, EMPTY).long()
