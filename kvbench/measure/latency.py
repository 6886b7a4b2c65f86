"""Latency: prefill, observation and compression apart, then decode ms a token over contexts.

The caches of all methods are built from one record and decode in turns of 16 steps, so that a drift of the machine
hits all alike. Every timed step is synchronised on both sides. On CUDA a step is the replay of a captured graph.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvbench.cache.account import held_bytes
from kvbench.cache.build import AnyCache, PrefixCache, build_cache, prefill
from kvbench.cache.record import PrefillRecord, clock
from kvbench.graph import EagerDecoder, GraphDecoder, decoder_for
from kvbench.measure.bench import Bench, Entry, Finding
from kvbench.rows import Row
from kvbench.settings import Latency

ROUND = 16
"""Steps that a method runs before the next one's turn."""

FIRST_CALL_TOKENS = 512
"""Room of the caches that kernels are compiled with: enough for every part that a store can have."""

RECOMPUTE_STEPS = 16
"""Without a cache every step costs a prefill: this many are timed, at most."""


@dataclass
class Timed:
    """One method at one context."""

    entry: Entry
    cache: AnyCache
    decoder: EagerDecoder | GraphDecoder
    observe_ms: float
    first_ms: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    fed: int = 0

    def affordable(self, count: int, timed: bool) -> int:
        """Steps of a turn of `count` that this method gets to run."""
        if not isinstance(self.cache, PrefixCache):
            return count
        return min(count, RECOMPUTE_STEPS - len(self.step_ms) if timed else 1)

    def turn(self, ids: Tensor, steps: int, timed: bool) -> None:
        """Feed the next `steps` tokens of ids [1, N], one at a time."""
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
    """One finding a context, then the slopes over contexts."""
    medians: dict[str, list[tuple[int, float]]] = {entry.label: [] for entry in bench.entries}
    for context in settings.contexts:
        steps = settings.warmup + settings.steps
        with bench.progress.phase(f"latency {context}", steps * len(bench.entries)) as advance:
            record, runs = _build(bench, context, steps, settings)
            if record is None:
                continue
            ids = bench.tokens[context : context + steps].unsqueeze(0).to(bench.loaded.device)
            rounds = [min(ROUND, settings.steps - first) for first in range(0, settings.steps, ROUND)]
            for turn, count in enumerate([settings.warmup, *rounds]):
                for run in runs:
                    with bench.cell(run.entry, "latency", context=context):
                        run.turn(ids, run.affordable(count, turn > 0), timed=turn > 0)
                    advance(count)
                # A cache that failed makes room for the others.
                runs = [run for run in runs if not bench.failed(run.entry, "latency", context=context)]
        for run in runs:
            medians[run.entry.label].append((context, float(np.median(run.step_ms))))
        yield Finding([row for run in runs for row in _rows(bench, run, record, context)])
    yield Finding([row for entry in bench.entries for row in slope(entry, medians[entry.label])])


def _build(bench: Bench, context: int, steps: int, settings: Latency) -> tuple[PrefillRecord | None, list[Timed]]:
    ids = bench.tokens[:context].unsqueeze(0).to(bench.loaded.device)
    runs: list[Timed] = []
    record: PrefillRecord | None = None
    with bench.shared(bench.entries, "latency", context=context):
        _first_calls(bench, ids[:, : min(64, context)], settings)  # what they cost is not the prompt's
        record = prefill(bench.loaded.model, ids, [entry.method.rule for entry in bench.entries])
    for entry in bench.entries if record is not None else []:
        with bench.cell(entry, "latency", context=context):
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


def _rows(bench: Bench, run: Timed, record: PrefillRecord, context: int) -> list[Row]:
    times = np.array(run.step_ms)
    kernel = run.cache.kernel_name + (", graph" if run.decoder.is_graph else "")
    base = replace(run.entry.row, measure="latency", context=context, batch=1, protocol="interleaved", kernel=kernel)
    p50, p90, p99 = np.percentile(times, [50, 90, 99])
    once = [("prefill_ms", record.prefill_ms), ("observe_ms", run.observe_ms), ("compress_ms", run.cache.compress_ms),
            ("ttft_ms", record.prefill_ms + run.observe_ms + run.cache.compress_ms + run.first_ms)]  # fmt: skip
    rows = [replace(base, metric=metric, value=value, unit="ms", n=1) for metric, value in once]
    for metric, value in (("tpot_p50_ms", p50), ("tpot_p90_ms", p90), ("tpot_p99_ms", p99)):
        rows.append(replace(base, metric=metric, value=float(value), unit="ms", n=len(times),
                            note=run.decoder.note))  # fmt: skip
    read = weight_bytes(bench.loaded.model) + held_bytes(run.cache.buffers()).used
    rows.append(replace(base, metric="read_gb_per_s", value=read / 1e6 / float(p50), unit="GB/s", n=len(times),
                        note="weights and kept tokens, read once a step"))  # fmt: skip
    if isinstance(run.cache, PrefixCache):
        rows.pop()
    for metric, unit, value in (
        ("engaged", "share", float(run.cache.has_compressed)), ("kept_tokens", "tokens", run.cache.kept_tokens),
        ("positions_processed", "positions", float(run.cache.positions_processed)),
    ):  # fmt: skip
        rows.append(replace(base, metric=metric, value=value, unit=unit, n=1))
    return rows


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def slope(entry: Entry, medians: list[tuple[int, float]]) -> list[Row]:
    """Least-squares slope of the median step over contexts, ms per 1,000 context tokens."""
    if len(medians) < 2:
        return []
    contexts, times = zip(*medians, strict=True)
    slope = float(np.polyfit(np.array(contexts) / 1000, np.array(times), 1)[0])
    note = "contexts " + ", ".join(map(str, contexts))
    return [replace(entry.row, measure="latency", metric="slope_ms_per_1k", value=slope, unit="ms", n=len(medians),
                    protocol="interleaved", note=note)]  # fmt: skip
