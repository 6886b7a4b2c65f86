"""Expected Attention: what the queries to come will look at, from the distribution of those that were."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.cache.observe import Observation, QueryMoments
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, Decode, KeepRule, is_whole
from kvbench.errors import UserError
from kvbench.kernels.prefill import softmax_with_sinks


@dataclass(frozen=True)
class ExpectedAttention(KeepRule):
    """Scores by the attention expected of future queries (Devoto et al., 2025, arXiv:2510.00636).

    Queries before their rotation are taken as normal, with the mean mu and covariance Sigma of the prompt's from
    position `n_sink` on; R is the mean rotation over the `future` positions behind the prompt. A key's expected weight
    is exp(s k . R mu + s^2 / 2 k' R Sigma R' k), s = 1 / sqrt(D), normalised over the tokens behind the sinks. Its mean
    over the query heads of a KV head, times ||v||, is the score. The `n_sink` first tokens and the newest stay.
    Decided once, at the end of the prompt: decode appends.
    """

    n_sink: int = 4
    future: int = 512
    decode: Decode = "append"

    decodes: ClassVar[tuple[Decode, ...]] = ("append",)

    def __post_init__(self) -> None:
        if not is_whole(self.n_sink) or self.n_sink < 0:
            raise UserError(f"sinks={self.n_sink} for {self.name}; type sinks=0 or more (the paper's is sinks=4)")
        if not is_whole(self.future) or self.future < 1:
            raise UserError(f"future={self.future} positions for {self.name}; type 1 or more (the paper's is 512)")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        return self.n_sink + 1

    @property
    def fixed_part(self) -> str:
        return f"{self.n_sink} sinks and the newest token"

    def observations(self) -> tuple[Observation, ...]:
        return (QueryMoments(self.n_sink),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        length, heads, scale = record.key.shape[2], record.key.shape[1], record.scoring.scaling
        moments = record.observed[QueryMoments(self.n_sink)].unflatten(1, (heads, -1))  # [B, Hkv, Hq/Hkv, 1 + D, D]
        # k . R q = R' k . q: turning the keys back once serves mean and covariance.
        key = record.turned_back(length, self.future)
        expected = torch.stack(
            [
                scale * (key @ of_head[:, :, 0].unsqueeze(-1)).squeeze(-1)
                + scale**2 / 2 * (key @ of_head[:, :, 1:] * key).sum(-1)
                for of_head in moments.unbind(2)
            ],
            dim=2,
        )  # [B, Hkv, Hq/Hkv, T]
        expected[..., : self.n_sink] = -torch.inf
        weight = softmax_with_sinks(expected.unsqueeze(3), record.scoring.sink_logits).squeeze(3).mean(2)
        scores: Tensor = weight * record.value.to(weight.dtype).norm(dim=-1)
        return scores.to(torch.float32)

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return torch.where((position < self.n_sink) | (position == newest), KEEP, scores)
