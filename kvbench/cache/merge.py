"""Merging: keys and values of evicted tokens are added to those of kept tokens, where the keep rule says so."""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evicted:
    """What one decision of a layer evicts, beside everything that the layer holds.

    key [B, Hkv, n, D], value [B, Hkv, n, Dv]: of all slots, in the model's basis, float32 or float64. position
    [B, Hkv, n]: the token in each slot, EMPTY where there is none. stays: bool [B, Hkv, n], slots whose token is kept.
    scores: float32 [B, Hkv, n], None where the rule keeps no scores. victims: int64 [B, Hkv, c], slots of the evicted
    tokens. layer: index. carried: float32 [B, Hkv, k], what the last decision of this layer carries over, NaN before
    the first one.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    stays: Tensor
    scores: Tensor | None
    victims: Tensor
    layer: int
    carried: Tensor


@dataclass(frozen=True)
class Merge:
    """Where each evicted token goes, and with which weight.

    With `mean` a kept row becomes the weighted mean of itself, of weight `own`, and of the evicted rows that go there;
    without, the weighted evicted rows are added to it.

    into: int64 [B, Hkv, c, m], slots of kept tokens, m for each evicted token. weight: [B, Hkv, c, m], 0: not merged.
    keys: whether keys are merged as values are. carried: float32 [B, Hkv, k], for the next decision; None: as it was.
    """

    into: Tensor
    weight: Tensor
    own: float = 1.0
    mean: bool = True
    keys: bool = True
    carried: Tensor | None = None


class MergeRule(Protocol):
    """A keep rule that merges; see `KeepRule`."""

    carries: ClassVar[int]

    @property
    def merges_prompt(self) -> bool:
        """Whether tokens that the prompt's own cut evicts are merged too."""

    def merge(self, evicted: Evicted) -> Merge:
        """Where each evicted token goes."""


def nothing_carried(rule: MergeRule, lead: tuple[int, ...], device: torch.device) -> Tensor:
    """What a layer [B, Hkv] carries before its first decision: float32 [B, Hkv, k], NaN."""
    return torch.full((*lead, rule.carries), torch.nan, device=device)


def merged_rows(rows: Tensor, victims: Tensor, merge: Merge) -> Tensor:
    """All rows [B, Hkv, n, D] after the rows `victims` [B, Hkv, c] have been merged into others."""
    gone = rows.gather(2, victims.unsqueeze(-1).expand(*victims.shape, rows.shape[-1]))
    added, total = torch.zeros_like(rows), rows.new_zeros(rows.shape[:3])
    for i in range(merge.into.shape[-1]):  # one target a victim at a time: no tensor of c times m rows
        into, weight = merge.into[..., i], merge.weight[..., i].to(rows.dtype)
        index = into.unsqueeze(-1).expand_as(gone)
        # The difference, so that merging equal rows, or none, gives the row itself to the bit.
        source = gone - rows.gather(2, index) if merge.mean else gone
        added.scatter_add_(2, index, weight.unsqueeze(-1) * source)
        total.scatter_add_(2, into, weight)
    return rows + (added / (merge.own + total).unsqueeze(-1) if merge.mean else added)


def merge_prompt(
    rule: MergeRule, key: Tensor, value: Tensor, kept: Tensor, scores: Tensor | None, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt's keys [B, Hkv, T, D] and values after its evicted tokens were merged, and what the layer carries.

    kept: int64 [B, Hkv, n], the positions that stay.
    """
    position = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
    stays = torch.zeros_like(position, dtype=torch.bool).scatter_(-1, kept, True)
    carried = nothing_carried(rule, key.shape[:2], key.device)
    count = key.shape[2] - kept.shape[2]
    if count == 0 or not rule.merges_prompt:
        return key, value, carried
    victims = (~stays).to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    wide = torch.promote_types(key.dtype, torch.float32)
    evicted = Evicted(key.to(wide), value.to(wide), position, stays, scores, victims, layer, carried)
    merge = rule.merge(evicted)
    new_key = merged_rows(evicted.key, victims, merge).to(key.dtype) if merge.keys else key
    new_value = merged_rows(evicted.value, victims, merge).to(value.dtype)
    return new_key, new_value, carried if merge.carried is None else merge.carried


def changed_slots(evicted: Evicted, merge: Merge, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slots [B, Hkv, c m] to write after a decision, and their keys and values.

    unused: int64 [B, Hkv, c], slots that hold nothing from now on, where victims that are not merged are written.
    """
    is_merged = merge.weight > 0
    slot = merge.into.where(is_merged, unused.unsqueeze(-1)).flatten(2)
    source = merge.into.where(is_merged, evicted.victims.unsqueeze(-1)).flatten(2)
    key = merged_rows(evicted.key, evicted.victims, merge) if merge.keys else evicted.key
    value = merged_rows(evicted.value, evicted.victims, merge)
    key, value = (rows.gather(2, source.unsqueeze(-1).expand(*source.shape, rows.shape[-1])) for rows in (key, value))
    return slot, key, value


def only_where(merge: Merge, over: Tensor, before: Tensor) -> Merge:
    """The merge if `over`, bool [], else none; before: what was carried."""
    carried = None if merge.carried is None else torch.where(over, merge.carried, before)
    return replace(merge, weight=merge.weight * over, carried=carried)
