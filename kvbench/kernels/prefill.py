"""Exact causal attention over a whole prompt, and the sums over its probabilities that keep rules need.

Everything here runs over blocks of query rows, so no T x T matrix is ever in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_BYTES = 8 * 2**20
"""Bytes of the score matrix of one block of rows: about a CPU's cache size, and small beside a prompt's keys."""

BLOCKS_ON_GPU = 16
"""Factor on the block size on a GPU, where every operation costs a launch."""

Combine = Literal["sum", "mean", "max"]
"""How the probabilities of the query heads of a KV head are combined into one number."""


@dataclass(frozen=True)
class Scoring:
    """How a layer turns `query @ key` into attention scores.

    scaling: factor on the scores. softcap: Gemma 2's tanh cap. window: a query sees the last `window` tokens, itself
    included. sink_logits: [Hq], gpt-oss's learned logits that take part in the softmax. chunked: a query sees the
    tokens of its own chunk of `window` positions instead (Llama 4).
    """

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sink_logits: Tensor | None = None
    chunked: bool = False

    def first_seen(self, position: Any) -> Any:
        """The first position that a query at `position` (a number or a tensor) sees; it may be negative."""
        if self.window is None:
            return position * 0
        return position // self.window * self.window if self.chunked else position - self.window + 1

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.window is None and self.sink_logits is None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention of a prompt over itself.

    Args:
        query: [B, Hq, T, D]; key: [B, Hkv, T, D]; value: [B, Hkv, T, Dv].

    Returns:
        [B, Hq, T, Dv] in the query's dtype.
    """
    if scoring.window is not None and scoring.window >= query.shape[2]:
        scoring = replace(scoring, window=None, chunked=False)
    if scoring.is_plain:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=grouped
        )
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    for rows, columns, probabilities in probability_blocks(query, key, scoring):
        block = probabilities.flatten(2, 3) @ value[:, :, columns].to(probabilities.dtype)
        output[:, :, rows] = block.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2).to(query.dtype)
    return output


def column_sums(query: Tensor, key: Tensor, scoring: Scoring, combine: Combine = "sum") -> Tensor:
    """Attention mass that each prompt token receives from all prompt queries: float32 [B, Hkv, T].

    The column sums of the causal probability matrix, the query heads of a KV head combined before summing. H2O's
    score (Zhang et al., 2023, arXiv:2306.14048, section 4.1).
    """
    sums = torch.zeros(*key.shape[:3], dtype=torch.float32, device=key.device)
    for _, columns, probabilities in probability_blocks(query, key, scoring):
        sums[:, :, columns] += combine_heads(probabilities, combine).sum(-2)
    return sums


def sums_by_head(query: Tensor, key: Tensor, scoring: Scoring, first: int) -> Tensor:
    """Attention mass that each token receives from the queries at `first` and after: float32 [B, Hkv, Hq/Hkv, T]."""
    grouped = key.shape[1], query.shape[1] // key.shape[1]
    sums = torch.zeros(key.shape[0], *grouped, key.shape[2], dtype=torch.float32, device=key.device)
    for _, columns, probabilities in probability_blocks(query, key, scoring, first):
        sums[..., columns] += probabilities.sum(-2).to(torch.float32)
    return sums


def last_queries(query: Tensor, key: Tensor, scoring: Scoring, count: int) -> Tensor:
    """Probabilities of the prompt's last `count` queries over all its keys, causal: float32 [B, Hkv, Hq/Hkv, w, T].

    w is `count`, or T where the prompt is shorter. SnapKV's observation window (Li et al., 2024, arXiv:2404.14469).
    """
    length = key.shape[2]
    first = max(0, length - count)
    grouped = key.shape[1], query.shape[1] // key.shape[1]
    out = torch.zeros(key.shape[0], *grouped, length - first, length, device=key.device)
    for rows, columns, probabilities in probability_blocks(query, key, scoring, first):
        out[..., rows.start - first : rows.stop - first, columns] = probabilities.to(torch.float32)
    return out


def query_moments(query: Tensor, first: int, unrotated: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Mean (row 0) and covariance of a prompt's queries from position `first` on: float32 [B, Hq, 1 + D, D].

    Computed by blocks of rows, which are centred before they are squared. `unrotated` removes the rotary embedding of
    query rows [B, Hq, n, D] from the position of the first row. Zeros where the prompt has at most `first` tokens.
    """
    batch, heads, length, dim = query.shape
    height = max(16, block_bytes(query.device) // (batch * heads * dim * 4))
    starts, count = range(first, length, height), max(1, length - first)
    mean = query.new_zeros(batch, heads, 1, dim, dtype=torch.promote_types(query.dtype, torch.float32))
    for start in starts:
        mean += unrotated(query[:, :, start : start + height], start).sum(2, keepdim=True) / count
    covariance = mean.new_zeros(batch, heads, dim, dim)
    for start in starts:
        centred = unrotated(query[:, :, start : start + height], start) - mean
        covariance += centred.mT @ centred / count
    return torch.cat([mean, covariance], dim=2)


def combine_heads(probabilities: Tensor, combine: Combine) -> Tensor:
    """[B, Hkv, Hq/Hkv, q, S] -> [B, Hkv, q, S]: one number per KV head."""
    if combine == "max":
        return probabilities.amax(2)
    return probabilities.mean(2) if combine == "mean" else probabilities.sum(2)


def probability_blocks(
    query: Tensor, key: Tensor, scoring: Scoring, first: int = 0
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Causal attention probabilities, one block of query rows at a time, from row `first` on.

    Yields (rows, columns, probabilities [B, Hkv, Hq/Hkv, rows, columns]); columns outside the yielded slice have
    probability 0. Computed in float32 (float64 for float64 queries).
    """
    batch, kv_heads, length, _ = key.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, -1))
    per_row = batch * query.shape[1] * length * dtype.itemsize
    height = max(16, block_bytes(key.device) // per_row)
    for start in range(first, length, height):
        stop = min(start + height, length)
        left = max(0, scoring.first_seen(start))
        block = grouped[:, :, :, start:stop].flatten(2, 3).to(dtype)
        scores = (block @ key[:, :, left:stop].to(dtype).mT).mul_(scoring.scaling)
        if scoring.softcap is not None:
            scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        scores = scores.unflatten(2, (-1, stop - start))
        scores.masked_fill_(~_sees(start, stop, left, scoring, key.device), -torch.inf)
        yield slice(start, stop), slice(left, stop), softmax_with_sinks(scores, scoring.sink_logits)


def block_bytes(device: torch.device) -> int:
    """Size of one block's score matrix."""
    return BLOCK_BYTES * (1 if device.type == "cpu" else BLOCKS_ON_GPU)


def _sees(start: int, stop: int, left: int, scoring: Scoring, device: torch.device) -> Tensor:
    row = torch.arange(start, stop, device=device).unsqueeze(-1)
    column = torch.arange(left, stop, device=device)
    sees = column <= row
    return sees if scoring.window is None else sees & (column >= scoring.first_seen(row))


def softmax_with_sinks(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax over the last dimension of [B, Hkv, Hq/Hkv, q, S] with one learned sink logit per head, [Hq]."""
    if sink_logits is None:
        return scores.softmax(-1)
    sink = sink_logits.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
