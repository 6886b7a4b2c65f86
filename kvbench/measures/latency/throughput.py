"""Throughput: tokens a second at the largest batch that fits, each method for itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvbench.cache.build import build_cache
from kvbench.cache.graph import WARM_UP, decoder_for
from kvbench.cache.record import clock
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.latency import Latency
from kvbench.measures.out_of_memory import fits_in_memory
from kvbench.measures.statistics import bounds, median_interval
from kvbench.results.row import Row

MOST = 256
"""The search ends here at the latest."""
STEPS = 8
"""Timed steps a batch, after those in which a graph is captured."""


@dataclass(frozen=True)
class TimedBatch:
    """Steps at one batch; kernel and doubt are the decoder's `kernel_name` and `note`."""

    batch: int
    seconds: list[float]
    kernel: str
    doubt: str | None


def throughput(context: RunContext, settings: Latency, prompt: int) -> Iterator[Row]:
    """Row tokens_per_s a method at the largest batch, in powers of two, that fits beside the model with its prefill."""
    for method in context.methods:
        if method.method.recomputes:
            continue
        with context.guarded(method, "latency", context=prompt):
            found, limit = _largest_batch(context, settings, method, prompt)
            if found is None:
                raise torch.OutOfMemoryError(f"not even one prompt of {prompt} tokens fits")
            yield from _rows(context, method, prompt, found, limit)


def _largest_batch(
    context: RunContext, settings: Latency, method: MethodRun, prompt: int
) -> tuple[TimedBatch | None, str]:
    """The steps at the largest batch that memory holds, None where not even one fits; and what ended the search."""
    found: list[TimedBatch] = []
    batch = 1
    while batch <= MOST:
        if not _has_room(context, prompt, batch):
            return (found[-1] if found else None), f"{batch} would not fit into the host's memory"
        size = batch
        if not fits_in_memory(lambda: found.append(_timed(context, settings, method, prompt, size))):  # noqa: B023
            return (found[-1] if found else None), f"{batch} ran out of memory"
        gc.collect()
        batch *= 2
    return found[-1], f"the search ends at {MOST}"


def _has_room(context: RunContext, prompt: int, batch: int) -> bool:
    """On a CPU an allocation that is too large may end the process: three times the dense cache must be free.

    Once for the record, once for the cache that is built from it, and as much again for what runs beside them.
    """
    if context.loaded.device.type != "cpu":
        return True
    import psutil  # type: ignore[import-untyped]

    shape = context.loaded
    layers = shape.n_layers - shape.state_layers
    dense = 2 * layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize * prompt * batch
    return bool(3 * dense < psutil.virtual_memory().available)


def _timed(context: RunContext, settings: Latency, method: MethodRun, prompt: int, batch: int) -> TimedBatch:
    model, device = context.loaded.model, context.loaded.device
    length = prompt + WARM_UP + 1 + STEPS
    starts = [i * max(0, len(context.tokens) - length) // batch for i in range(batch)]
    ids = context.windows(starts, length)
    cache = build_cache(model, method.method, ids[:, :prompt], max_new_tokens=length - prompt, kernel=context.kernel)
    decoder = decoder_for(model, cache, settings.graph)
    seconds = []
    for t in range(prompt, length):
        started = clock(device)
        decoder.feed(ids[:, t : t + 1])
        seconds.append(clock(device) - started)
    return TimedBatch(batch, seconds[-STEPS:], decoder.kernel_name, decoder.note)


def _rows(context: RunContext, method: MethodRun, prompt: int, found: TimedBatch, why: str) -> Iterator[Row]:
    rates = [found.batch / second for second in found.seconds]
    note = "; ".join(filter(None, (f"the largest batch, in powers of two: {why}", found.doubt)))
    yield replace(
        method.row,
        measure="latency",
        metric="tokens_per_s",
        unit="tokens/s",
        context=prompt,
        batch=found.batch,
        protocol="largest_batch",
        value=float(np.median(rates)),
        n=len(rates),
        kernel=found.kernel,
        note=note,
        **bounds(median_interval(rates, context.seed)),
    )
