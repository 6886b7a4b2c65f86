"""Decode attention in plain torch: the reference that the fast kernels are tested against."""

import torch
from torch import Tensor

from kvbench.kernels.options import NO_OPTIONS, AttendOptions
from kvbench.kernels.parts import Dense, Paged, Part, Parts, Split, read_all, total_length
from kvbench.kernels.prefill import Scoring, softmax_with_sinks

NAME = "reference"


def attend(
    query: Tensor, keys: Parts, values: Parts, scoring: Scoring, options: AttendOptions = NO_OPTIONS
) -> tuple[Tensor, Tensor]:
    """Attention of q query tokens over a store's slots.

    Args:
        query: [B, Hq, q, D]; query heads of one KV head are neighbours.
        keys, values: parts covering the same S slots, [B, Hkv, S, D] and [B, Hkv, S, Dv] once read.
        scoring: scaling, softcap and learned sinks; the caller applies its window through `options.visible`.
        options: which slots are seen, the query of the sinks, filled lengths; probabilities are always returned.

    Returns:
        output [B, Hq, q, Dv] in the query's dtype; probabilities [B, Hkv, Hq / Hkv, q, S] in the computing dtype
        (float32, or float64 for a float64 query).
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    kv_heads = keys[0].kv_heads
    visible, sink_query, n_sink, lengths = options.visible, options.sink_query, options.n_sink, options.lengths
    if lengths is not None:
        keys, values, filled = in_slot_order(keys, values, lengths, dtype)
        visible = filled.unsqueeze(2) if visible is None else filled.unsqueeze(2) & visible
    folded = fold(query.to(dtype), kv_heads)
    scores = torch.cat([products(folded, part) for part in keys], dim=-1)
    if sink_query is not None and n_sink:
        scores[..., :n_sink] = fold(sink_query.to(dtype), kv_heads) @ first_rows(keys, n_sink, dtype).mT
    scores *= scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.unflatten(2, (-1, query.shape[2]))  # [B, Hkv, Hq/Hkv, q, S]
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(2), -torch.inf)
    if isinstance(keys[0], Paged) and (missing := keys[0].missing()) is not None:
        scores = scores.masked_fill(missing[:, :, None, None], -torch.inf)
    probabilities = softmax_with_sinks(scores, scoring.sink_logits)
    flat, start = probabilities.flatten(2, 3), 0
    output: Tensor | None = None
    for part in values:
        partial = flat[..., start : start + part.length] @ part.read(dtype)
        output = partial if output is None else output + partial
        start += part.length
    if output is None:
        raise ValueError("attention over a store without a single slot")
    return output.unflatten(2, (-1, query.shape[2])).flatten(1, 2).to(query.dtype), probabilities


def in_slot_order(
    keys: Parts, values: Parts, lengths: Tensor, dtype: torch.dtype
) -> tuple[list[Part], list[Part], Tensor]:
    """Buffers that are filled up to `lengths`, as one part each: slot i in row i.

    Values that are not filled are zeros. The third result is bool [B, Hkv, S], true where a slot is filled. Nothing
    here waits for the device.
    """
    slot = torch.arange(total_length(keys), device=lengths.device)
    filled = slot < lengths[..., 2, None].long()
    key, value = (_by_slot(parts, slot, lengths[..., i, None].long(), dtype) for i, parts in enumerate((keys, values)))
    # Slots that were never written may hold NaN: scores are masked, but values would make the sum NaN.
    held = Dense(value.read(dtype).masked_fill(~filled.unsqueeze(-1), 0.0))
    return [key], [held], filled.expand(*held.rows.shape[:2], -1)


def _by_slot(parts: Parts, slot: Tensor, packed: Tensor, dtype: torch.dtype) -> Part:
    """Whole buffers as one part with the slots [S] in order, where the first `packed`, broadcastable to [B, Hkv, 1],
    lie in the packed part."""
    if len(parts) == 1:
        return parts[0]
    dense = parts[-1]
    capacity, size = total_length(parts) - dense.length, max(1, dense.length)
    is_ring = isinstance(dense, Dense) and dense.is_ring
    row = slot % size if is_ring else (slot - packed).clamp(0, size - 1)
    index = torch.where(slot < packed, slot, capacity + row).clamp(max=total_length(parts) - 1)
    rows = read_all(parts, dtype)
    lead = (*rows.shape[:2], slot.shape[0])
    return Dense(rows.gather(2, index.expand(lead).unsqueeze(-1).expand(*lead, rows.shape[-1])))


def fold(query: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, q, D] -> [B, Hkv, Hq/Hkv * q, D]: the query heads of a KV head become rows of one matrix product."""
    folded: Tensor = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return folded


def products(folded: Tensor, part: Part) -> Tensor:
    """[B, Hkv, n, D] times a part's rows: [B, Hkv, n, S]. The two sides of a `Split` are scored by themselves."""
    if isinstance(part, Split):
        last = part.last_channels
        cut = folded.shape[-1] - last.rows.shape[-1]
        return products(folded[..., :cut], part.first_channels) + products(folded[..., cut:], last)
    return folded @ part.read(folded.dtype).mT


def first_rows(keys: Parts, n: int, dtype: torch.dtype) -> Tensor:
    rows: list[Tensor] = []
    for part in keys:
        take = min(n - sum(r.shape[-2] for r in rows), part.length)
        if take:
            rows.append(part.first(take).read(dtype))
    return torch.cat(rows, dim=-2)
