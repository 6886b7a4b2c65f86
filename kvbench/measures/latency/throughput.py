"""Throughput: tokens a second at the largest batch that fits, each method for itself."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.graph import WARM_UP, decoder_for
from kvbench.cache.record import clock
from kvbench.measures.context import Bench, Entry, give_memory_back, is_out_of_memory
from kvbench.measures.settings import Latency
from kvbench.measures.statistics import bounds, median_interval
from kvbench.results.row import Row

MOST = 256
"""The search ends here at the latest."""
STEPS = 8
"""Timed steps a batch, after those in which a graph is captured."""


@dataclass(frozen=True)
class Timed:
    """Steps at one batch; kernel and doubt are the decoder's `kernel_name` and `note`."""

    batch: int
    seconds: list[float]
    kernel: str
    doubt: str | None


def throughput(bench: Bench, settings: Latency, context: int) -> Iterator[Row]:
    """Row tokens_per_s a method, its batch the largest power of two that fits, with its prefill, beside the model."""
    for entry in bench.entries:
        if entry.method.recomputes:
            continue
        with bench.cell(entry, "latency", context=context):
            found: Timed | None = None
            batch, why = 1, f"the search ends at {MOST}"
            while batch <= MOST:
                try:
                    if not _has_room(bench, context, batch):
                        why = f"{batch} would not fit into the host's memory"
                        break
                    found = _timed(bench, settings, entry, context, batch)
                except (MemoryError, RuntimeError) as error:  # torch's own out-of-memory is a RuntimeError
                    if not is_out_of_memory(error):
                        raise
                    why = f"{batch} ran out of memory"
                    break
                finally:
                    gc.collect()
                batch *= 2
            give_memory_back()
            if found is None:
                raise torch.OutOfMemoryError(f"not even one prompt of {context} tokens fits")
            yield from _rows(bench, entry, context, found, why)


def _has_room(bench: Bench, context: int, batch: int) -> bool:
    """On a CPU an allocation that is too large may end the process: three times the dense cache must be free.

    Once for the record, once for the cache that is built from it, and as much again for what runs beside them.
    """
    if bench.loaded.device.type != "cpu":
        return True
    import psutil  # type: ignore[import-untyped]

    shape = bench.loaded
    layers = shape.n_layers - shape.state_layers
    dense = 2 * layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize * context * batch
    return bool(3 * dense < psutil.virtual_memory().available)


def _timed(bench: Bench, settings: Latency, entry: Entry, context: int, batch: int) -> Timed:
    model, device = bench.loaded.model, bench.loaded.device
    length = context + WARM_UP + 1 + STEPS
    starts = [i * max(0, len(bench.tokens) - length) // batch for i in range(batch)]
    ids = torch.stack([bench.window(s, length) for s in starts]).to(device)
    record = prefill(model, ids[:, :context], [entry.method.rule])
    cache = build_cache(model, entry.method, record, max_new_tokens=length - context, kernel=bench.kernel)
    del record
    decoder = decoder_for(model, cache, settings.graph)
    seconds = []
    for t in range(context, length):
        started = clock(device)
        decoder.feed(ids[:, t : t + 1])
        seconds.append(clock(device) - started)
    return Timed(batch, seconds[-STEPS:], decoder.kernel_name, decoder.note)


def _rows(bench: Bench, entry: Entry, context: int, found: Timed, why: str) -> Iterator[Row]:
    rates = [found.batch / second for second in found.seconds]
    note = "; ".join(filter(None, (f"the largest batch, in powers of two: {why}", found.doubt)))
    yield replace(
        entry.row,
        measure="latency",
        metric="tokens_per_s",
        unit="tokens/s",
        context=context,
        batch=found.batch,
        protocol="largest_batch",
        value=float(np.median(rates)),
        n=len(rates),
        kernel=found.kernel,
        note=note,
        **bounds(median_interval(rates, bench.seed)),
    )
