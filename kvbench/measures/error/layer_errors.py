"""Errors of one layer's cache against exact attention over the same tokens, for one query."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.cache.contents import Contents
from kvbench.cache.rule import EMPTY
from kvbench.kernels.parts import Dense
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.reference import attend

TINY = 1e-30
"""Probabilities below it count as this much: their logarithm is noise."""

METRICS = ("key_error", "value_error", "key_cosine", "logit_error", "logit_correlation", "attention_kl", "output_error")
"""What `layer_errors` returns."""


def layer_errors(found: Contents, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> dict[str, Tensor]:
    """Errors by window and KV head, each float32 [B, Hkv]; means over the query heads of a KV head.

    - key_error, value_error: norm of the difference over the norm of the exact ones, over the kept tokens.
    - key_cosine: mean cosine of held and exact keys.
    - logit_error: root mean square of the difference of q.k over the kept tokens, without the part that is equal for
      all of them, which the softmax takes away.
    - logit_correlation: Pearson's, of held and exact q.k over the kept tokens.
    - attention_kl: KL(held || exact) of the attention probabilities, nats. Of an exact subset of tokens it is minus the
      logarithm of the attention mass that the subset has.
    - output_error: norm of the attention output's difference over the norm of the exact output.

    Args:
        query: [B, Hq, 1, D] at the position after `key` [B, Hkv, t, D] and `value` [B, Hkv, t, Dv], the exact ones.
    """
    output, probabilities = attend(query, [Dense(key)], [Dense(value)], scoring)
    filled = found.position != EMPTY
    at = found.position.clamp(min=0)
    index = at.unsqueeze(-1)
    exact_keys = key.to(torch.float32).gather(2, index.expand(-1, -1, -1, key.shape[-1]))
    exact_values = value.to(torch.float32).gather(2, index.expand(-1, -1, -1, value.shape[-1]))
    exact = probabilities.squeeze(-2).to(torch.float32)  # [B, Hkv, Hq / Hkv, t]
    exact_here = exact.gather(-1, at.unsqueeze(2).expand(-1, -1, exact.shape[2], -1))
    held_log, exact_log = (p.clamp(min=TINY).log() for p in (found.probabilities, exact_here))
    kept = filled.unsqueeze(2)
    difference = centred(held_log - exact_log, kept)
    cosine = torch.nn.functional.cosine_similarity(found.keys, exact_keys, dim=-1)
    group = exact.shape[2]
    return {
        "key_error": relative(found.keys - exact_keys, exact_keys, filled),
        "value_error": relative(found.values - exact_values, exact_values, filled),
        "key_cosine": mean_over(cosine, filled),
        "logit_error": mean_over(difference.square(), kept).sqrt().mean(-1),
        "logit_correlation": correlation(held_log, exact_log, kept).mean(-1),
        "attention_kl": (found.probabilities * (held_log - exact_log)).masked_fill(~kept, 0.0).sum(-1).mean(-1),
        "output_error": by_kv_head(found.output, output.to(torch.float32), group),
    }


def relative(difference: Tensor, exact: Tensor, filled: Tensor) -> Tensor:
    """Norm over norm of rows [B, Hkv, S, D] in filled slots: [B, Hkv]."""
    above, below = (x.square().sum(-1).masked_fill(~filled, 0.0).sum(-1) for x in (difference, exact))
    ratio: Tensor = above / below.clamp(min=TINY)
    return ratio.sqrt()


def by_kv_head(held: Tensor, exact: Tensor, group: int) -> Tensor:
    """Relative error of outputs [B, Hq, 1, Dv], the mean over the query heads of each KV head: [B, Hkv]."""
    each = (held - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=TINY)
    grouped: Tensor = each.squeeze(-1).unflatten(1, (-1, group))
    return grouped.mean(-1)


def mean_over(values: Tensor, filled: Tensor) -> Tensor:
    """Mean over the filled slots, the last dimension."""
    return values.masked_fill(~filled, 0.0).sum(-1) / filled.sum(-1).clamp(min=1)


def centred(values: Tensor, filled: Tensor) -> Tensor:
    """The values minus their mean over the filled slots."""
    return values - mean_over(values, filled).unsqueeze(-1)


def correlation(first: Tensor, second: Tensor, filled: Tensor) -> Tensor:
    """Pearson's correlation over the filled slots; 1 where neither varies."""
    a, b = centred(first, filled), centred(second, filled)
    spread = mean_over(a.square(), filled) * mean_over(b.square(), filled)
    return torch.where(spread > TINY, mean_over(a * b, filled) / spread.clamp(min=TINY).sqrt(), 1.0)


def stacked(layers: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Errors of all layers, each float32 [B, layers, Hkv], on the CPU."""
    found = list(layers)
    return {name: torch.stack([layer[name] for layer in found], dim=1).cpu() for name in METRICS}
