"""Fidelity: how long free generation says what the full cache says, and whether it gets longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.measures.context import RunContext
    from kvbench.measures.result import Result


@dataclass(frozen=True)
class Fidelity(Measure):
    """`samples` prompts of each context, each continued greedily by `tokens` tokens at most, `batch` at a time."""

    name: ClassVar[str] = "fidelity"
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("divergence_step", "same tokens", "significant", "high"),
        Headline("diverged_share", "diverged", "percent", "low"),
        Headline("length_ratio", "length", "x", rank=1),
        *ENGAGED,
    )

    contexts: list[int] = setting([1024])
    tokens: int = setting(64)
    samples: int = setting(4, most=100_000)
    batch: int = setting(4, most=4096)

    @property
    def size(self) -> int:
        return max(self.contexts)

    def cells(self) -> list[Fidelity]:
        return [replace(self, contexts=[context]) for context in self.contexts]

    def prompts(self) -> list[int]:
        return self.contexts

    def needed_tokens(self) -> tuple[str, int]:
        return "fidelity.contexts", self.size + self.tokens

    def sample_limit(self, lengths: Sequence[int]) -> tuple[str, int, int]:
        each = 1 + (min(lengths) - self.size) // self.tokens
        return "fidelity.samples", self.samples, each * len(lengths)

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.fidelity.continuations import continue_prompts

        yield from continue_prompts(context, self)
