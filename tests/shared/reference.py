"""Slow references, written from the definitions: whole-matrix attention, rotation, quantisation of a group.

Nothing here is shared with the engine.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

# ---------------------------------------------------------------- attention and rotation


@cache
def turns(half: int, theta: float, positions: int = 2048) -> Tensor:
    """e^(i p f) for every position p and frequency f: complex128 [positions, half]."""
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE as complex numbers: x [B, H, n, D], positions [n] or [B, H, n]; channel i pairs with i + D / 2."""
    half = x.shape[-1] // 2
    paired = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
    turned = paired * turns(half, theta)[positions]
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention_matrix(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """The whole probability matrix [B, Hq, q, n].

    query [B, Hq, q, D], key [B, Hkv, n, D], visible bool [..., q, n] broadcastable to [B, Hq, q, n].
    """
    group = query.shape[1] // key.shape[1]
    per_head = [query[:, h] @ key[:, h // group].transpose(-1, -2) for h in range(query.shape[1])]
    scores = torch.stack(per_head, dim=1) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = torch.where(visible, scores, torch.full_like(scores, -math.inf))
    highest = scores.amax(-1, keepdim=True)
    extra = torch.zeros_like(highest)
    if sink_logits is not None:
        learned = sink_logits.to(scores.dtype).view(1, -1, 1, 1)
        highest = torch.maximum(highest, learned)
        extra = (learned - highest).exp()
    weights = (scores - highest).exp()
    return weights / (weights.sum(-1, keepdim=True) + extra)


def attention_output(probabilities: Tensor, value: Tensor) -> Tensor:
    """[B, Hq, q, n] and [B, Hkv, n, Dv] -> [B, Hq, q, Dv]."""
    heads = probabilities.shape[1]
    group = heads // value.shape[1]
    return torch.stack([probabilities[:, h] @ value[:, h // group] for h in range(heads)], dim=1)


def causal_mask(n: int, window: int | None = None) -> Tensor:
    """bool [n, n]: row i sees columns i - window + 1 .. i."""
    row, column = torch.arange(n)[:, None], torch.arange(n)[None]
    mask = column <= row
    return mask if window is None else mask & (column > row - window)


def per_kv_head(probabilities: Tensor, kv_heads: int, combine: str) -> Tensor:
    """[B, Hq, q, n] -> [B, Hkv, q, n] by a loop over the heads."""
    group = probabilities.shape[1] // kv_heads
    heads = []
    for head in range(kv_heads):
        own = [probabilities[:, head * group + i] for i in range(group)]
        stacked = torch.stack(own)
        heads.append({"sum": stacked.sum(0), "mean": stacked.mean(0), "max": stacked.max(0).values}[combine])
    return torch.stack(heads, dim=1)


# ---------------------------------------------------------------- quantisation


def quantised(groups: Tensor, bits: int) -> Tensor:
    """What a group (last dimension) is after encoding and decoding: float64, same shape.

    mn and s are float16; codes are computed in float32 against the stored pair; s = 0 gives mn.
    """
    x = groups.float()
    levels = 2**bits - 1
    minimum = x.min(-1, keepdim=True).values
    scale = ((x.max(-1, keepdim=True).values - minimum) / levels).half().float()
    minimum = minimum.half().float()
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = torch.round(torch.clamp((x - minimum) / safe, 0, levels))
    codes = torch.where(scale == 0, torch.zeros_like(codes), codes)
    return codes.double() * scale.double() + minimum.double()


def along_tokens(block: Tensor, bits: int, group: int) -> Tensor:
    """Groups of consecutive tokens, one scale a channel: [B, H, n, D], n a multiple of group."""
    pieces = [
        quantised(block[:, :, i : i + group].transpose(-1, -2), bits).transpose(-1, -2)
        for i in range(0, block.shape[2], group)
    ]
    return torch.cat(pieces, dim=2)


def along_channels(block: Tensor, bits: int, group: int) -> Tensor:
    """Groups of consecutive channels within a token: [B, H, n, D], D a multiple of group."""
    pieces = [quantised(block[..., i : i + group], bits) for i in range(0, block.shape[-1], group)]
    return torch.cat(pieces, dim=-1)
