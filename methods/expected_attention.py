"""Expected Attention: keeps the tokens that future queries are predicted to attend to."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.cache.observe import Observation, QueryMoments
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule
from kvbench.cache.rule_settings import whole
from kvbench.kernels.prefill import softmax_with_sinks


@dataclass(frozen=True)
class ExpectedAttention(KeepRule):
    """Scores by the expected attention of future queries (Devoto et al., 2025, arXiv:2510.00636).

    Un-rotated queries are modelled as normally distributed, with the mean mu and the covariance Sigma of the prompt's
    queries from position `n_sink` on. R is the mean rotation over the `future` positions after the prompt. A key's
    expected weight is exp(s k . R mu + s^2 / 2 k' R Sigma R' k), s = 1 / sqrt(D), normalised over the tokens after the
    sinks. The score is the mean weight over the query heads of a KV head, times ||v||. The `n_sink` first tokens and
    the newest token stay. Tokens are scored once, at the end of the prompt: decode appends.
    """

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    future: int = whole(512, least=1)
    decode: Decode = "append"

    decodes: ClassVar[tuple[Decode, ...]] = ("append",)

    def observations(self) -> tuple[Observation, ...]:
        return (QueryMoments(self.n_sink),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        length, heads, scale = record.key.shape[2], record.key.shape[1], record.scoring.scaling
        moments = record.observed[QueryMoments(self.n_sink)].unflatten(1, (heads, -1))  # [B, Hkv, Hq/Hkv, 1 + D, D]
        # k . R q = R' k . q: keys rotated back once serve the mean and the covariance.
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
