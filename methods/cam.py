"""CaM: adds the values of evicted tokens to those of the tokens that follow them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.merge import Evicted, Merge
from kvbench.cache.observe import ColumnSums, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import choice, whole
from kvbench.methods.random import drawn


@dataclass(frozen=True)
class CaM(KeepRule):
    """Cache merging (Zhang et al., 2024, PMLR 235, 58840; github.com/zyxxmu/cam).

    The first `n_sink` tokens and the newest ones stay, as in the authors' code. The value of an evicted token, divided
    by m, is added to the values of the m = `merge` kept tokens that follow it, or of all of them where fewer follow. It
    happens with probability min(1, A / mean A of those m tokens), drawn by a hash of (seed, layer, head, position). A
    is the attention mass that a token has received so far, over all query heads of its KV head. Keys stay as they are.

    With merge_by="sum", the authors' form, only what decode evicts is merged, as in their generation code: the prompt's
    cut evicts hundreds of tokens, whose values would drown the m that they are added to. merge_by="mean" divides each
    sum by its weights, so that a value keeps its size, and merges what the prompt's cut evicts too. The mean A is over
    the m tokens and A is summed over queries, as in the authors' code for long texts; their code for tasks takes A from
    the newest query alone and its mean over the whole window.
    """

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    recipients: int = whole(32, least=1, knob="merge")
    merge_by: str = choice("sum", "mean", knob="variant")
    seed: int = whole(0, least=0)

    reads_attention = True
    merges = True

    @property
    def merges_prompt(self) -> bool:
        return self.merge_by == "mean"

    def observations(self) -> tuple[Observation, ...]:
        return (ColumnSums(),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return record.observed[ColumnSums()]

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return scores + probabilities.sum((2, -2))

    def evictable_priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return position.to(torch.float64)

    def merge(self, evicted: Evicted) -> Merge:
        assert evicted.scores is not None
        into, follows = self._recipients(evicted)
        count = follows.sum(-1).to(evicted.value.dtype)
        flat = evicted.scores.gather(-1, into.flatten(2)).view(into.shape)
        mean = (flat * follows).sum(-1) / count
        probability = (evicted.scores.gather(-1, evicted.victims) / mean).nan_to_num(0.0)
        position = evicted.position.gather(-1, evicted.victims)
        is_merged = drawn(position, evicted.layer, self.seed) < probability * 2**31
        weight = follows * (is_merged / count).unsqueeze(-1)
        return Merge(into, weight, mean=self.merge_by == "mean", keys=False)

    def _recipients(self, evicted: Evicted) -> tuple[Tensor, Tensor]:
        """Slots of the kept tokens that follow each evicted one, [B, Hkv, c, m], and which of them there are."""
        position, none = evicted.position.long(), torch.iinfo(torch.int64).max
        ascending = position.masked_fill(~evicted.stays, none).sort(dim=-1)
        first = torch.searchsorted(ascending.values, position.gather(-1, evicted.victims), right=True)
        rank = first.unsqueeze(-1) + torch.arange(self.recipients, device=position.device)
        rank = rank.clamp(max=position.shape[-1] - 1)  # the last one is no token's: the evicted ones do not stay
        follows = ascending.values.gather(-1, rank.flatten(2)).view(rank.shape) != none
        into = ascending.indices.gather(-1, rank.where(follows, 0).flatten(2)).view(rank.shape)
        return into, follows
