"""Rows and samples of a method's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.error import Error
from kvbench.measures.result import engagement_rows
from kvbench.measures.statistics import ENOUGH_WINDOWS, bounds, mean_interval, units_of
from kvbench.results.row import Row, with_flags
from kvbench.texts.tokens import token_hash

UNITS = {"attention_kl": "nats", "kl": "nats", "logit_error": "logits"}
WORST = {"output_error": torch.amax, "logit_correlation": torch.amin}
"""Metrics that have a row for their worst layer as well, and which layer that is."""
BY_HEAD = "output_error"
"""The metric that samples hold for each layer and head."""


@dataclass
class Errors:
    """A method's errors, one tensor a batch of windows.

    layers: by metric, float32 [B, layers, Hkv], means over the evaluated tokens. residual: [B, layers], of the residual
    stream after each layer of the model. kl: [B], KL of the predictions from the full cache's, the mean over all
    decoded tokens. engaged: share of those that followed an eviction or a quantisation. kept: tokens held at the end.
    index: the model's layers that `layers` holds.
    """

    layers: dict[str, list[Tensor]] = field(default_factory=dict)
    residual: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    engaged: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    index: list[int] = field(default_factory=list)

    def add(self, layers: list[dict[str, Tensor]], residual: list[Tensor], kl: list[Tensor]) -> None:
        """Take one batch: errors and residual errors of each evaluated token, KL of each decoded one."""
        for name in layers[0]:
            self.layers.setdefault(name, []).append(torch.stack([one[name] for one in layers]).mean(0))
        if residual and kl:
            self.residual.append(torch.stack(residual).mean(0))
            self.kl.append(torch.stack(kl, dim=1).mean(1))


def error_rows(method: MethodRun, errors: Errors, context: RunContext, settings: Error) -> Iterator[Row]:
    """A row for each metric: the mean over windows, layers and heads, with an interval over windows."""
    windows = len(settings.offsets(context.lengths))
    base = replace(
        method.row,
        measure="error",
        protocol="prefill_decode",
        context=settings.context,
        batch=min(settings.batch, settings.windows),
        n=windows,
        note=f"{windows} windows of {settings.context} + {settings.tokens} tokens, looked at after "
        f"{len(settings.evaluated())} of them",
    )
    if windows < ENOUGH_WINDOWS:
        base = with_flags(base, "few_windows")
    for metric, batches in errors.layers.items():
        values = torch.cat(batches)  # [W, layers, Hkv]
        yield _mean(base, metric, values.flatten(1).mean(1), context.seed)
        if metric in WORST:
            worst = WORST[metric](values.mean((0, 2)), 0)
            yield replace(base, metric=f"{metric}_worst_layer", value=float(worst), unit=_unit(metric))
    if len(errors.kl) == len(errors.engaged):
        yield _mean(base, "residual_error", torch.cat(errors.residual).mean(1), context.seed)
        yield _mean(base, "kl", torch.cat(errors.kl), context.seed)
    yield from engagement_rows(base, float(np.mean(errors.engaged)), float(np.mean(errors.kept)))


def _mean(base: Row, metric: str, values: Tensor, seed: int) -> Row:
    """The mean over windows [W]."""
    units = units_of(values.double().numpy()[:, None])
    found = mean_interval(units, seed) if np.isfinite(units.mean) else None
    return replace(base, metric=metric, value=units.mean, unit=_unit(metric), **bounds(found))


def _unit(metric: str) -> str:
    return UNITS.get(metric, "share")


def error_samples(
    methods: Sequence[MethodRun], errors: Mapping[str, Errors], context: RunContext, settings: Error
) -> list[dict[str, Any]]:
    """One record a window: each method's attention output errors by layer and KV head, four digits each."""
    maps = {method.label: torch.cat(errors[method.label].layers[BY_HEAD]) for method in methods}
    samples = []
    for i, offset in enumerate(settings.offsets(context.lengths)):
        ids = context.window(offset, settings.longest).tolist()
        sample: dict[str, Any] = {
            "measure": "error",
            "sample": i,
            "offset": offset,
            "context": settings.context,
            "protocol": "prefill_decode",
            "sha256": token_hash(ids),
            "methods": [
                {
                    "method": method.row.method,
                    "store": method.row.store,
                    "knobs": method.knobs,
                    "layers": errors[method.label].index,
                    BY_HEAD: [[float(f"{value:.4g}") for value in heads] for heads in maps[method.label][i].tolist()],
                }
                for method in methods
            ],
        }
        if context.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples
