"""Latency: prefill, observation and compression timed apart, then decode ms a token over contexts and batches.

The caches of all methods are built from one record and decode in turns of 16 steps, so that a drift of the machine
hits all alike. Every timed step is synchronised on both sides: TPOT is one step, on CUDA the replay of a captured
graph. ITL is the interval between two tokens of a greedy generation, each chosen from the one before.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import AnyCache
from kvbench.cache.graph import EagerDecoder, GraphDecoder, decoder_for
from kvbench.cache.record import PrefillRecord, clock
from kvbench.measures.context import Journal, MethodRun, RunContext
from kvbench.measures.fallbacks import Fallback, announce, fallbacks_for
from kvbench.measures.latency import Latency
from kvbench.measures.latency.generation import Generation, generation
from kvbench.measures.latency.machine import Machine, machine_now, read_bandwidth, read_bytes
from kvbench.measures.latency.throughput import throughput
from kvbench.measures.latency.time_ratios import ratio_row
from kvbench.measures.out_of_memory import with_fallback
from kvbench.measures.result import Result, engagement_rows
from kvbench.measures.statistics import bounds, median_interval, percentile_interval
from kvbench.results.row import Row, with_flags

ROUND = 16
"""Steps that a method runs before the next method's turn."""

FIRST_CALL_TOKENS = 512
"""Tokens of the caches that kernels are compiled with: enough for every part of a store."""

RECOMPUTE_STEPS = 16
"""Without a cache every step costs a prefill: this many are timed, at most."""

STEADY = 0.1
"""Share by which the median of the second half of the steps may differ from the first's."""


@dataclass
class TimedMethod:
    """One method at one context and batch."""

    method: MethodRun
    cache: AnyCache
    decoder: EagerDecoder | GraphDecoder
    observe_ms: float
    first_ms: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    fed: int = 0

    def affordable(self, count: int, timed: bool) -> int:
        """Steps of a turn of `count` that this method gets to run."""
        if not self.cache.recomputes:
            return count
        return min(count, RECOMPUTE_STEPS - len(self.step_ms) if timed else 1)

    def turn(self, ids: Tensor, steps: int, timed: bool) -> None:
        """Feed the next `steps` tokens of ids [B, N], one at a time."""
        device = ids.device
        for _ in range(steps):
            token = ids[:, self.fed : self.fed + 1]
            started = clock(device)
            self.decoder.feed(token)
            elapsed = 1e3 * (clock(device) - started)
            self.first_ms = self.first_ms or elapsed
            self.fed += 1
            if timed:
                self.step_ms.append(elapsed)


def time_decoding(context: RunContext, settings: Latency) -> Iterator[Result]:
    """One result a context and batch, then the throughput of each context where asked for.

    Slopes over contexts are a summary of the cells: see `Latency.summarise`.
    """
    for prompt in settings.contexts:
        for batch in settings.batches:
            found = _at(context, settings, prompt, batch)
            yield Result([row for rows in found.values() for row in rows])
        if settings.throughput:
            yield Result(list(throughput(context, settings, prompt)))


def _at(context: RunContext, settings: Latency, prompt: int, batch: int) -> dict[str, list[Row]]:
    """The rows of each method at a context and batch.

    All methods decode in turns from one prefill. Those that run out of memory do so again with the next fallback, where
    fewer methods or none are beside them.
    """
    found: dict[str, list[Row]] = {}
    waiting = list(context.methods)
    fallbacks = fallbacks_for(context.loaded.device, len(waiting))

    def attempt(fallback: Fallback) -> None:
        nonlocal waiting
        again: list[MethodRun] = []
        for group in [waiting] if fallback.together else [[method] for method in waiting]:
            rows, out_of_memory = _attempt(context, group, settings, prompt, batch, fallback, fallback is fallbacks[-1])
            found.update(rows)
            again += out_of_memory
        waiting = again
        if waiting:
            raise torch.OutOfMemoryError(f"{len(waiting)} methods ran out of memory")

    with_fallback(fallbacks, attempt, partial(announce, context))
    return found


def _attempt(
    context: RunContext,
    group: list[MethodRun],
    settings: Latency,
    prompt: int,
    batch: int,
    fallback: Fallback,
    is_last: bool,
) -> tuple[dict[str, list[Row]], list[MethodRun]]:
    """The rows of those that could be measured, and the methods for which memory ran out, to be tried again.

    Failures that are final go to the context's journal: all on the last fallback, else all but running out of memory.
    """
    trial = replace(context, methods=group, journal=Journal())
    rows = _together(trial, settings, prompt, batch, fallback.on_host)
    again = {label for label, row in trial.journal.failures if row.status == "oom" and not is_last}
    final = [failure for failure in trial.journal.failures if failure[0] not in again]
    context.journal.failures.extend(final)
    context.journal.tracebacks.extend(trial.journal.tracebacks if final else [])
    measured = {label: of_method for label, of_method in rows.items() if label not in again}
    if fallback.note is not None:
        context.journal.fallbacks.update(dict.fromkeys(measured, fallback.note))
    return measured, [method for method in group if method.label in again]


def _together(context: RunContext, settings: Latency, prompt: int, batch: int, on_host: bool) -> dict[str, list[Row]]:
    """The rows of methods whose caches are built from one record."""
    record, timed = _timed(context, settings, prompt, batch, on_host)
    if record is None:
        return {}
    machine = machine_now(context.loaded.device)
    # Only steps of the same turns are compared: a full cache that was timed alone has no ratio.
    full_ms = next((one.step_ms for one in timed if one.method.is_baseline), [])
    found = {one.method.label: list(_rows(context, one, record, prompt, machine, full_ms)) for one in timed}
    methods = [one.method for one in timed]
    timed.clear()  # the caches make room for those that generate
    for generated in _generations(context, settings, record, methods, prompt):
        found[generated.method.label] += generated.rows(context.seed)
    return found


def batch_ids(context: RunContext, batch: int, length: int) -> Tensor:
    """[B, length] of the text, each row from another place where the text is long enough."""
    room = max(0, len(context.tokens) - length)
    starts = [i * room // batch for i in range(batch)]
    return context.windows(starts, length)


def _timed(
    context: RunContext, settings: Latency, prompt: int, batch: int, on_host: bool
) -> tuple[PrefillRecord | None, list[TimedMethod]]:
    steps = settings.warmup + settings.steps
    where = {"context": prompt, "batch": batch}
    name = f"latency {prompt}" if batch == 1 else f"latency {prompt} x {batch}"
    with context.progress.phase(name, steps * len(context.methods)) as advance:
        ids = batch_ids(context, batch, prompt + steps)
        record, timed = _build(context, settings, ids[:, :prompt], where, on_host)
        rounds = [min(ROUND, settings.steps - first) for first in range(0, settings.steps, ROUND)]
        for turn, count in enumerate([settings.warmup, *rounds]):
            for one in timed:
                with context.guarded(one.method, "latency", **where):
                    one.turn(ids[:, prompt:], one.affordable(count, turn > 0), timed=turn > 0)
                advance(count)
            # A cache that failed makes room for the others.
            timed = [one for one in timed if not context.has_failed(one.method, "latency", **where)]
    return record, timed


def _build(
    context: RunContext, settings: Latency, ids: Tensor, where: dict[str, int], on_host: bool
) -> tuple[PrefillRecord | None, list[TimedMethod]]:
    model, steps = context.loaded.model, settings.warmup + settings.steps
    timed: list[TimedMethod] = []
    record: PrefillRecord | None = None
    with context.guarded(context.methods, "latency", **where):
        _first_calls(context, ids[:, :64], settings)  # the cost of first calls is not counted as prefill
        from_record = [method for method in context.methods if not method.method.reads_in_chunks(ids.shape[1])]
        record = prefill(context.loaded.model, ids, [method.method.rule for method in from_record], on_host)
    for method in context.methods if record is not None else []:
        with context.guarded(method, "latency", **where):
            cache = build_cache(
                context.loaded.model, method.method, record, max_new_tokens=steps, kernel=context.kernel
            )
            # A chunk's observations are its attention's own probabilities: their time is the prefill's.
            wanted = method.method.rule.observations() if cache.prefill_ms is None else ()
            observed = sum(record.observe_ms[o] for o in dict.fromkeys(wanted))
            decoder = decoder_for(model, cache, settings.graph, settings.warmup)
            timed.append(TimedMethod(method, cache, decoder, observed))
    return record, timed


def _first_calls(context: RunContext, ids: Tensor, settings: Latency) -> None:
    """A short prefill, and on a GPU, where kernels are compiled at their first call, a step of each method."""
    if ids.device.type != "cuda":
        prefill(context.loaded.model, ids)
        return
    record = prefill(context.loaded.model, ids, [method.method.rule for method in context.methods])
    for method in context.methods:
        with suppress(Exception):  # a method that fails here fails again in its own cell, which reports it
            cache = build_cache(context.loaded.model, method.method, record, FIRST_CALL_TOKENS, kernel=context.kernel)
            decoder_for(context.loaded.model, cache, settings.graph).feed(ids[:, :1])


def _generations(
    context: RunContext, settings: Latency, record: PrefillRecord, methods: list[MethodRun], prompt: int
) -> list[Generation]:
    found = []
    for method in methods:
        with context.guarded(method, "latency", context=prompt, batch=record.ids.shape[0]):
            if not method.method.recomputes:
                found.append(generation(context, settings, method, record))
    return [each for each in found if not context.has_failed(each.method, "latency", context=prompt, batch=each.batch)]


def _rows(
    context: RunContext,
    one: TimedMethod,
    record: PrefillRecord,
    prompt: int,
    machine: Machine,
    full_ms: Sequence[float],
) -> Iterator[Row]:
    """The rows of one method. full_ms: the steps of the full cache in the same turns; empty where it was not timed."""
    times, batch = np.array(one.step_ms), record.ids.shape[0]
    prefill_ms = record.prefill_ms if one.cache.prefill_ms is None else one.cache.prefill_ms
    steady = is_steady(one.step_ms, context.seed)
    unsteady = None if steady else "the first and the second half of the steps differ"
    doubts = (one.decoder.note, machine.note, unsteady)
    base = replace(
        one.method.row,
        measure="latency",
        context=prompt,
        batch=batch,
        protocol="interleaved",
        n=1,
        kernel=one.decoder.kernel_name,
        note="; ".join(filter(None, doubts)) or None,
    )
    if not steady:
        base = with_flags(base, "unsteady")
    once = [
        ("prefill_ms", prefill_ms),
        ("observe_ms", one.observe_ms),
        ("compress_ms", one.cache.compress_ms),
        ("ttft_ms", prefill_ms + one.observe_ms + one.cache.compress_ms + one.first_ms),
    ]
    for metric, value in once:
        yield replace(base, metric=metric, value=value, unit="ms")
    many = replace(base, n=len(times))
    for percent in (50, 90, 99):
        yield replace(
            many,
            metric=f"tpot_p{percent}_ms",
            value=float(np.percentile(times, percent)),
            unit="ms",
            **bounds(percentile_interval(times, percent, context.seed)),
        )
    if full_ms:
        yield ratio_row(many, one.step_ms, full_ms, context.seed)
    yield replace(many, metric="steady", value=float(steady), unit="yes")
    if not one.cache.recomputes:
        yield from _bandwidth_rows(context, one, many)
    yield from engagement_rows(base, one.cache.has_compressed, one.cache.kept_tokens, one.cache.positions_processed)
    for metric, unit, number in (("load_average", "processes", machine.load), ("clock_mhz", "MHz", machine.clock_mhz)):
        if number is not None:
            yield replace(base, metric=metric, value=number, unit=unit)


def is_steady(step_ms: list[float], seed: int) -> bool:
    """Whether the medians of the first and the second half agree to 10%, or within their intervals."""
    if len(step_ms) < 4:
        return True
    half = len(step_ms) // 2
    first, second = step_ms[:half], step_ms[half:]
    a, b = float(np.median(first)), float(np.median(second))
    if abs(a - b) <= STEADY * min(a, b):
        return True
    before, after = median_interval(first, seed), median_interval(second, seed)
    return before is not None and after is not None and before[0] <= after[1] and after[0] <= before[1]


def _bandwidth_rows(context: RunContext, one: TimedMethod, base: Row) -> Iterator[Row]:
    """Bytes that a step must read, over the time that it took, and that over what the memory gives at best."""
    read = read_bytes(context.loaded.model) + held_bytes(one.cache.buffers()).used
    rate, best = read / (1e-3 * float(np.median(one.step_ms))), read_bandwidth(context.loaded.device)
    note = "; ".join(filter(None, ("weights and kept tokens, read once a step", base.note)))
    yield replace(base, metric="bytes_per_s", value=rate, unit="bytes/s", note=note)
    if best is not None:
        yield replace(
            base,
            metric="bandwidth_share",
            value=rate / best,
            unit="share",
            note=f"of {best / 1e9:.1f} GB/s, what reading alone came to in this process; {note}",
        )
