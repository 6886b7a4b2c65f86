"""Expected Attention: keeps the tokens that future queries are predicted to attend to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.held import HeldTokens
from kvbench.cache.observe import Observation, QueryMoments, RecentQueries
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule
from kvbench.cache.rule_settings import whole
from kvbench.kernels.prefill import Scoring, query_moments, softmax_with_sinks

MOST_QUERIES = 256
"""Queries that are kept while decoding, at most: as many as kvpress keeps hidden states."""


@dataclass(frozen=True)
class ExpectedAttention(KeepRule):
    """Scores by the expected attention of future queries (Devoto et al., 2025, arXiv:2510.00636).

    Un-rotated queries are modelled as normally distributed, with the mean mu and the covariance Sigma of the prompt's
    queries from position `n_sink` on. R is the mean rotation over the `future` positions after the prompt. A key's
    expected weight is exp(s k . R mu + s^2 / 2 k' R Sigma R' k), s = 1 / sqrt(D), normalised over the tokens after the
    sinks. The score is the mean weight over the query heads of a KV head, times ||v||. The `n_sink` first tokens and
    the newest token stay. The prompt is scored once, at its end. Decode appends.

    With decode="evict" it is the paper's form for long outputs, with the numbers of kvpress: every `buffer` steps all
    tokens are scored anew, by the moments of the newest min(`buffer`, 256) queries, for the positions after the newest
    token. kvpress also leaves the oldest `n_sink` of these queries out, and counts positions from their number.
    """

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    future: int = whole(512, least=1)
    buffer: int = whole(512, least=1)
    decode: Decode = "append"

    @property
    def evicts_every(self) -> int:
        return self.buffer

    def observations(self) -> tuple[Observation, ...]:
        prompt = (QueryMoments(self.n_sink),)
        return (*prompt, RecentQueries(min(self.buffer, MOST_QUERIES))) if self.decode == "evict" else prompt

    def initial_scores(self, record: LayerRecord) -> Tensor:
        # k . R q = R' k . q: keys rotated back once serve the mean and the covariance.
        key = record.turned_back(record.key.shape[2], self.future)
        return self._expected(key, record.value, record.observed[QueryMoments(self.n_sink)], record.scoring)

    def scores_at_eviction(self, held: HeldTokens) -> Tensor:
        rotation, query = held.rotation, held.recent_query
        assert rotation is not None  # QueryMoments asks for it
        first = held.seen - query.shape[2]
        moments = query_moments(query, 0, lambda rows, start: rotation.to_start(rows, first + start))
        return self._expected(rotation.by_mean(held.key, held.seen, self.future), held.value, moments, held.scoring)

    def _expected(self, key: Tensor, value: Tensor, moments: Tensor, scoring: Scoring) -> Tensor:
        """Scores [B, Hkv, T], from keys rotated back by R, values and the queries' moments [B, Hq, 1 + D, D]."""
        scale = scoring.scaling
        moments = moments.unflatten(1, (key.shape[1], -1))  # [B, Hkv, Hq/Hkv, 1 + D, D]
        expected = torch.stack(
            [
                scale * (key @ of_head[:, :, 0].unsqueeze(-1)).squeeze(-1)
                + scale**2 / 2 * (key @ of_head[:, :, 1:] * key).sum(-1)
                for of_head in moments.unbind(2)
            ],
            dim=2,
        )  # [B, Hkv, Hq/Hkv, T]
        expected[..., : self.n_sink] = -torch.inf
        weight = softmax_with_sinks(expected.unsqueeze(3), scoring.sink_logits).squeeze(3).mean(2)
        scores: Tensor = weight * value.to(weight.dtype).norm(dim=-1)
        return scores.to(torch.float32)
