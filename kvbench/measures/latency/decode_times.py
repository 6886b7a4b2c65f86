"""Latency: prefill, observation and compression apart, then decode ms a token over contexts and batches.

The caches of all methods are built from one record and decode in turns of 16 steps, so that a drift of the machine
hits all alike. Every timed step is synchronised on both sides: TPOT is one step, on CUDA the replay of a captured
graph. ITL is the interval between two tokens of a greedy generation, each chosen from the one before.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import AnyCache
from kvbench.cache.graph import EagerDecoder, GraphDecoder, decoder_for
from kvbench.cache.record import PrefillRecord, clock
from kvbench.measures.context import Bench, Entry, Finding
from kvbench.measures.fallbacks import announce, ways_of
from kvbench.measures.latency.generation import Generation, generation
from kvbench.measures.latency.machine import Machine, machine_now, read_bandwidth
from kvbench.measures.latency.throughput import throughput
from kvbench.measures.settings import Latency
from kvbench.measures.statistics import bounds, median_interval, percentile_interval
from kvbench.results.row import Row

ROUND = 16
"""Steps that a method runs before the next one's turn."""

FIRST_CALL_TOKENS = 512
"""Room of the caches that kernels are compiled with: enough for every part that a store can have."""

RECOMPUTE_STEPS = 16
"""Without a cache every step costs a prefill: this many are timed, at most."""

STEADY = 0.1
"""Share by which the median of the second half of the steps may differ from the first's."""


@dataclass
class Timed:
    """One method at one context and batch."""

    entry: Entry
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


def latency(bench: Bench, settings: Latency) -> Iterator[Finding]:
    """One finding a context and batch, then the slopes over contexts, a batch each."""
    medians: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for context in settings.contexts:
        for batch in settings.batches:
            found = _at(bench, settings, context, batch)
            for label, rows in found.items():
                points = [(context, row.value) for row in rows if row.metric == "tpot_p50_ms" and row.value is not None]
                medians.setdefault((label, batch), []).extend(points)
            yield Finding([row for rows in found.values() for row in rows])
        if settings.throughput:
            yield Finding(list(throughput(bench, settings, context)))
    yield Finding(
        [
            row
            for batch in settings.batches
            for entry in bench.entries
            for row in slope(entry, medians.get((entry.label, batch), []), batch)
        ]
    )


def _at(bench: Bench, settings: Latency, context: int, batch: int) -> dict[str, list[Row]]:
    """The rows of each method at a context and batch.

    All decode in turns from one prefill; those for which memory ran out do so again on the next of the `ways_of`
    prefilling, where fewer or none are beside them.
    """
    found: dict[str, list[Row]] = {}
    waiting, ways = bench.entries, ways_of(bench.loaded.device, len(bench.entries))
    for way in ways:
        if waiting and way is not ways[0]:
            announce(bench, way)
        for group in [waiting] if way.together else [[entry] for entry in waiting]:
            trial = replace(bench, entries=group, failures=[], tracebacks=[])
            rows = _together(trial, settings, context, batch, way.on_host) if group else {}
            again = {label for label, row in trial.failures if row.status == "oom" and way is not ways[-1]}
            final = [failure for failure in trial.failures if failure[0] not in again]
            bench.failures.extend(final)
            bench.tracebacks.extend(trial.tracebacks if final else [])
            waiting = [entry for entry in waiting if entry not in group or entry.label in again]
            found |= {label: of_method for label, of_method in rows.items() if label not in again}
            bench.ways |= {label: way.note for label in rows if label not in again and way.note is not None}
    return found


def _together(bench: Bench, settings: Latency, context: int, batch: int, on_host: bool) -> dict[str, list[Row]]:
    """The rows of methods whose caches are built from one record."""
    record, runs = _timed(bench, settings, context, batch, on_host)
    if record is None:
        return {}
    machine = machine_now(bench.loaded.device)
    found = {run.entry.label: list(_rows(bench, run, record, context, machine)) for run in runs}
    entries = [run.entry for run in runs]
    runs.clear()  # the caches make room for those that generate
    for said in _generations(bench, settings, record, entries, context):
        found[said.entry.label] += said.rows(bench.seed)
    return found


def batch_ids(bench: Bench, batch: int, length: int) -> Tensor:
    """[B, length] of the text, each row from another place where the text is long enough."""
    room = max(0, len(bench.tokens) - length)
    starts = [i * room // batch for i in range(batch)]
    return torch.stack([bench.window(s, length) for s in starts]).to(bench.loaded.device)


def _timed(
    bench: Bench, settings: Latency, context: int, batch: int, on_host: bool
) -> tuple[PrefillRecord | None, list[Timed]]:
    steps = settings.warmup + settings.steps
    where = {"context": context, "batch": batch}
    name = f"latency {context}" if batch == 1 else f"latency {context} x {batch}"
    with bench.progress.phase(name, steps * len(bench.entries)) as advance:
        ids = batch_ids(bench, batch, context + steps)
        record, runs = _build(bench, settings, ids[:, :context], where, on_host)
        rounds = [min(ROUND, settings.steps - first) for first in range(0, settings.steps, ROUND)]
        for turn, count in enumerate([settings.warmup, *rounds]):
            for run in runs:
                with bench.cell(run.entry, "latency", **where):
                    run.turn(ids[:, context:], run.affordable(count, turn > 0), timed=turn > 0)
                advance(count)
            # A cache that failed makes room for the others.
            runs = [run for run in runs if not bench.failed(run.entry, "latency", **where)]
    return record, runs


def _build(
    bench: Bench, settings: Latency, ids: Tensor, where: dict[str, int], on_host: bool
) -> tuple[PrefillRecord | None, list[Timed]]:
    steps = settings.warmup + settings.steps
    runs: list[Timed] = []
    record: PrefillRecord | None = None
    with bench.shared(bench.entries, "latency", **where):
        _first_calls(bench, ids[:, :64], settings)  # what they cost is not the prompt's
        record = prefill(bench.loaded.model, ids, [entry.method.rule for entry in bench.entries], on_host)
    for entry in bench.entries if record is not None else []:
        with bench.cell(entry, "latency", **where):
            cache = build_cache(bench.loaded.model, entry.method, record, max_new_tokens=steps, kernel=bench.kernel)
            observed = sum(record.observe_ms[o] for o in dict.fromkeys(entry.method.rule.observations()))
            decoder = decoder_for(bench.loaded.model, cache, settings.graph, settings.warmup)
            runs.append(Timed(entry, cache, decoder, observed))
    return record, runs


def _first_calls(bench: Bench, ids: Tensor, settings: Latency) -> None:
    """A short prefill, and on a GPU, where kernels are compiled at their first call, a step of each method."""
    if ids.device.type != "cuda":
        prefill(bench.loaded.model, ids)
        return
    record = prefill(bench.loaded.model, ids, [entry.method.rule for entry in bench.entries])
    for entry in bench.entries:
        with suppress(Exception):  # what is wrong with a method is told by its own cell
            cache = build_cache(bench.loaded.model, entry.method, record, FIRST_CALL_TOKENS, kernel=bench.kernel)
            decoder_for(bench.loaded.model, cache, settings.graph).feed(ids[:, :1])


def _generations(
    bench: Bench, settings: Latency, record: PrefillRecord, entries: list[Entry], context: int
) -> list[Generation]:
    found = []
    for entry in entries:
        with bench.cell(entry, "latency", context=context, batch=record.ids.shape[0]):
            if not entry.method.recomputes:
                found.append(generation(bench, settings, entry, record))
    return [each for each in found if not bench.failed(each.entry, "latency", context=context, batch=each.batch)]


def _rows(bench: Bench, run: Timed, record: PrefillRecord, context: int, machine: Machine) -> Iterator[Row]:
    times, batch = np.array(run.step_ms), record.ids.shape[0]
    steady = is_steady(run.step_ms, bench.seed)
    unsteady = None if steady else "unsteady: the first and the second half of the steps differ"
    doubts = (run.decoder.note, machine.note, unsteady)
    base = replace(
        run.entry.row,
        measure="latency",
        context=context,
        batch=batch,
        protocol="interleaved",
        n=1,
        kernel=run.decoder.kernel_name,
        note="; ".join(filter(None, doubts)) or None,
    )
    once = [
        ("prefill_ms", record.prefill_ms),
        ("observe_ms", run.observe_ms),
        ("compress_ms", run.cache.compress_ms),
        ("ttft_ms", record.prefill_ms + run.observe_ms + run.cache.compress_ms + run.first_ms),
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
            **bounds(percentile_interval(times, percent, bench.seed)),
        )
    yield replace(many, metric="steady", value=float(steady), unit="yes")
    if not run.cache.recomputes:
        yield from _bandwidth_rows(bench, run, many)
    for metric, unit, number in (
        ("engaged", "share", float(run.cache.has_compressed)),
        ("kept_tokens", "tokens", run.cache.kept_tokens),
        ("positions_processed", "positions", float(run.cache.positions_processed)),
        ("load_average", "processes", machine.load),
        ("clock_mhz", "MHz", machine.clock_mhz),
    ):
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


def _bandwidth_rows(bench: Bench, run: Timed, base: Row) -> Iterator[Row]:
    """Bytes that a step must read, over the time that it took, and that over what the memory gives at best."""
    read = read_bytes(bench.loaded.model) + held_bytes(run.cache.buffers()).used
    rate, best = read / (1e-3 * float(np.median(run.step_ms))), read_bandwidth(bench.loaded.device)
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


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters that a step reads, shared ones once: all but an input embedding that is that alone."""
    found = {id(parameter): parameter for parameter in model.parameters()}
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not embedding:
        found.pop(id(embedding), None)  # a step looks up one row a token
    return sum(parameter.numel() * parameter.element_size() for parameter in found.values())


def slope(entry: Entry, medians: list[tuple[int, float]], batch: int = 1) -> list[Row]:
    """Least-squares slope of the median step over contexts, ms per 1,000 context tokens."""
    if len(medians) < 2:
        return []
    contexts, times = zip(*medians, strict=True)
    slope = float(np.polyfit(np.array(contexts) / 1000, np.array(times), 1)[0])
    note = "contexts " + ", ".join(map(str, contexts))
    return [
        replace(
            entry.row,
            measure="latency",
            metric="slope_ms_per_1k",
            value=slope,
            unit="ms",
            n=len(medians),
            protocol="interleaved",
            batch=batch,
            note=note,
        )
    ]
