"""Exact attention of a prompt's chunk over the kept tokens before it, as their store holds them, and over itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.parts import Parts, total_length
from kvbench.kernels.prefill import Scoring, block_bytes, softmax_with_sinks
from kvbench.kernels.reference import first_rows, fold, products


@dataclass(frozen=True)
class Held:
    """The kept tokens before a chunk.

    query: [B, Hq, q, D], the chunk's queries in the basis of `keys`. keys, values: parts of S slots each; none where
    nothing is held. position: int [B, Hkv, S], the token in each slot. restore: takes an output [B, Hq, q, Dv] from the
    basis of `values` to the model's. sink_query: [B, Hq, q, D], the query for the first `n_sink` slots; None: `query`.
    """

    query: Tensor
    keys: Parts
    values: Parts
    position: Tensor
    restore: Callable[[Tensor], Tensor]
    sink_query: Tensor | None = None
    n_sink: int = 0


def attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, first: int, held: Held, scoring: Scoring, want_probabilities: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of the chunk's q tokens over the held tokens and, causally, over the chunk itself.

    The chunk's own keys and values are the model's, so nothing of it is quantised before it has been attended to. Runs
    over blocks of query rows: without probabilities no q x S matrix is in memory.

    Args:
        query: [B, Hq, q, D]; key [B, Hkv, q, D] and value [B, Hkv, q, Dv]: the chunk's. first: position of its first
            token.

    Returns:
        output [B, Hq, q, Dv] in the query's dtype; probabilities [B, Hq, q, S + q] in the computing dtype (float32, or
        float64 for a float64 query), held slots first, or None where they are not wanted.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    count, slots = query.shape[2], total_length(held.keys)
    keys, own = [part for part in held.keys if part.length], (key.to(dtype), value.to(dtype))
    rows_of_values = [part.read(dtype) for part in held.values if part.length]
    height = max(16, block_bytes(query.device) // (query.shape[0] * query.shape[1] * (slots + count) * dtype.itemsize))
    outputs, found = [], []
    for start in range(0, count, height):
        rows = slice(start, min(start + height, count))
        scores = torch.cat([*_held_scores(held, keys, rows, dtype), _grouped(query[:, :, rows].to(dtype), own[0])], -1)
        scores *= scoring.scaling
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        newest = torch.arange(first + rows.start, first + rows.stop, device=query.device).unsqueeze(-1)
        scores.masked_fill_(~_sees(held.position, newest, first, count, scoring, scores.shape[1]), -torch.inf)
        # `softmax_with_sinks` takes query heads by KV head; the sinks are one for each query head.
        probabilities = softmax_with_sinks(scores.unsqueeze(2), scoring.sink_logits).squeeze(2)
        outputs.append(_output(probabilities, slots, rows_of_values, own[1], held, query.dtype))
        if want_probabilities:
            found.append(probabilities)
    return torch.cat(outputs, 2), torch.cat(found, 2) if want_probabilities else None


def _held_scores(held: Held, keys: Parts, rows: slice, dtype: torch.dtype) -> list[Tensor]:
    """The products of the query rows with the held keys, [B, Hq, rows, S]; empty where nothing is held."""
    if not keys:
        return []
    heads, kv_heads = held.query.shape[1], keys[0].kv_heads
    folded = fold(held.query[:, :, rows].to(dtype), kv_heads)
    scores = torch.cat([products(folded, part) for part in keys], dim=-1)
    if held.sink_query is not None and held.n_sink:
        sinks = fold(held.sink_query[:, :, rows].to(dtype), kv_heads)
        scores[..., : held.n_sink] = sinks @ first_rows(keys, held.n_sink, dtype).mT
    return [scores.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)]


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """query [B, Hq, n, D] times key [B, Hkv, S, D]: [B, Hq, n, S]."""
    products_by_head: Tensor = (fold(query, key.shape[1]) @ key.mT).unflatten(2, (-1, query.shape[2])).flatten(1, 2)
    return products_by_head


def _sees(position: Tensor, newest: Tensor, first: int, count: int, scoring: Scoring, heads: int) -> Tensor:
    """Which tokens each query row sees, bool broadcastable to [B, Hq, rows, S + q].

    newest: [rows, 1], the rows' own positions. Held tokens are older than the chunk.
    """
    own = torch.arange(first, first + count, device=newest.device)
    if scoring.window is None:
        of_chunk = own <= newest
        return torch.cat([of_chunk.new_ones(len(newest), position.shape[-1]), of_chunk], dim=-1)
    oldest = scoring.first_seen(newest)
    of_held = (position.unsqueeze(-2) >= oldest).repeat_interleave(heads // position.shape[1], dim=1)
    of_chunk = ((own <= newest) & (own >= oldest)).expand(*of_held.shape[:2], -1, -1)
    return torch.cat([of_held, of_chunk], dim=-1)


def _output(
    probabilities: Tensor, slots: int, values: list[Tensor], own: Tensor, held: Held, dtype: torch.dtype
) -> Tensor:
    """Probabilities [B, Hq, rows, S + q] times the held values and the chunk's own: [B, Hq, rows, Dv]."""
    output = _weighted(probabilities[..., slots:], own)
    start = 0
    partial: Tensor | None = None
    for rows in values:
        part = _weighted(probabilities[..., start : start + rows.shape[2]], rows)
        partial = part if partial is None else partial + part
        start += rows.shape[2]
    if partial is not None:
        output = output + held.restore(partial.to(dtype)).to(output.dtype)
    return output.to(dtype)


def _weighted(probabilities: Tensor, value: Tensor) -> Tensor:
    """[B, Hq, n, S] times [B, Hkv, S, Dv]: [B, Hq, n, Dv]."""
    weighted = fold(probabilities, value.shape[1]) @ value
    output: Tensor = weighted.unflatten(2, (-1, probabilities.shape[2])).flatten(1, 2)
    return output
