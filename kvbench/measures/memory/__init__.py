"""Memory: bytes that a cache holds, by part, and the peaks of prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.measures.context import RunContext
    from kvbench.measures.result import Result


@dataclass(frozen=True)
class Memory(Measure):
    """Bytes after each context and `tokens` decoded tokens, each method in a subprocess of its own where `isolate`."""

    name: ClassVar[str] = "memory"
    rates_quality: ClassVar[bool] = False
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("held_bytes", "held", "bytes", "low", exact=True),
        Headline("x_smaller", "x smaller than 16-bit", "x", "high", exact=True),
        Headline("dense_bytes", "dense", "bytes", folds=True),
        Headline("analytic_bytes", "formula", "bytes", rank=2),
        Headline("slack_bytes", "slack", "bytes", rank=1),
        Headline("compressible_share", "compressible", "percent", rank=1, folds=True),
        Headline("bits_per_value", "bits/value", "fixed2", "low", exact=True),
        Headline("peak_prefill_bytes", "peak prefill", "bytes"),
        Headline("peak_decode_bytes", "peak decode", "bytes"),
        *ENGAGED,
    )
    is_timed: ClassVar[bool] = True
    compares_with_full: ClassVar[bool] = False
    one_method_at_a_time: ClassVar[bool] = True

    contexts: list[int] = setting([512, 2048, 4096])
    tokens: int = setting(16)
    isolate: bool = True

    @property
    def size(self) -> int:
        return max(self.contexts)

    def cells(self) -> list[Memory]:
        return [replace(self, contexts=[context]) for context in self.contexts]

    def prompts(self) -> list[int]:
        return self.contexts

    def needed_tokens(self) -> tuple[str, int]:
        return "memory.contexts", self.size + self.tokens

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.memory.cache_bytes import measure_bytes

        yield from measure_bytes(context, self)
