"""Latency: prefill, observation and compression apart, then decode ms a token over contexts and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.results.headline import Headline
from kvbench.results.row import Row

if TYPE_CHECKING:
    from kvbench.measures.context import MethodRun, RunContext
    from kvbench.measures.result import Result

GENERATED = 21
"""Tokens that a generation of fixed length decodes at most: 16 intervals, one token, and a capture before them."""


@dataclass(frozen=True)
class Latency(Measure):
    """Decode times after each context, in each batch: `warmup` discarded steps, then `steps` timed ones.

    graph: on CUDA a step is the replay of a captured graph, unless False. tokens_natural: most tokens of a generation
    that goes on to the end of its text; 0: none. throughput: also search for the largest batch that fits, and time it.
    """

    name: ClassVar[str] = "latency"
    rates_quality: ClassVar[bool] = False
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("prefill_ms", "prefill", "ms", "low"),
        Headline("observe_ms", "observe", "ms", "low", rank=1),
        Headline("compress_ms", "compress", "ms", "low"),
        Headline("ttft_ms", "TTFT", "ms", "low", rank=1),
        Headline("tpot_p50_ms", "TPOT p50", "ms", "low"),
        Headline("tpot_to_full", "TPOT / full's", "x", "low"),
        Headline("tpot_p90_ms", "p90", "ms", "low"),
        Headline("tpot_p99_ms", "p99", "ms", "low", rank=1),
        Headline("itl_p50_ms", "between tokens", "ms", "low", rank=2),
        Headline("tokens_per_s", "tokens/s", "significant", "high", rank=1),
        Headline("slope_ms_per_1k", "slope", "ms_per_1k"),
        Headline("bandwidth_share", "bandwidth", "percent", "high", rank=1),
        Headline("bytes_per_s", "read a second", "bytes", rank=2),
        *ENGAGED,
    )
    is_timed: ClassVar[bool] = True
    contexts: list[int] = setting([512, 2048, 4096])
    steps: int = setting(48, most=1_000_000)
    warmup: int = setting(8, lowest=0, most=1_000_000)
    graph: Literal["auto", False] = "auto"
    batches: list[int] = setting([1], most=65_536)
    tokens_natural: int = setting(0, lowest=0)
    throughput: bool = False

    @property
    def size(self) -> int:
        return max(self.contexts)

    def cells(self) -> list[Latency]:
        alone = [replace(self, contexts=[context]) for context in self.contexts]
        return [cell for one in alone for cell in one._by_batch()]

    def beside(self, methods: Sequence[MethodRun], everyone: Sequence[MethodRun]) -> list[MethodRun]:
        """The full cache, for the ratio of times; nothing beside a throughput, which each method has by itself."""
        return super().beside(methods, everyone) if self.batches else []

    def _by_batch(self) -> list[Latency]:
        """A cell for each batch, and one without batches for the throughput."""
        apart = [replace(self, batches=[batch], throughput=False) for batch in self.batches]
        return [*apart, replace(self, batches=[])] if self.throughput else apart

    def summaries(self) -> list[Latency]:
        """The slope over contexts, one for each batch."""
        if len(self.contexts) < 2:
            return []
        return [replace(self, batches=[batch], throughput=False) for batch in self.batches]

    def summarises(self, cell: Measure) -> bool:
        return isinstance(cell, Latency) and cell.batches == self.batches

    def summarise(self, method: MethodRun, rows: Sequence[Row]) -> list[Row]:
        from kvbench.measures.latency.slope import slope

        return slope(method, rows, self.batches[0])

    def prompts(self) -> list[int]:
        return self.contexts

    def needed_tokens(self) -> tuple[str, int]:
        longest = max(self.steps + self.warmup, self.tokens_natural, GENERATED)
        return "latency.contexts", self.size + longest

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.latency.decode_times import time_decoding

        yield from time_decoding(context, self)
