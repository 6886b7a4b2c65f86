"""Paging: requests of mixed lengths in blocks of one pool, and what a shared prefix saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.measures.measure import Measure, setting
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.measures.context import RunContext
    from kvbench.measures.result import Result


@dataclass(frozen=True)
class Paging(Measure):
    """Requests that have `prefix` tokens in common and `own` ones behind them, one of each; `tokens` decoded after."""

    name: ClassVar[str] = "paging"
    rates_quality: ClassVar[bool] = False
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("contiguous_bytes", "contiguous", "bytes", exact=True),
        Headline("contiguous_waste_bytes", "wasted", "bytes", "low", rank=2, exact=True),
        Headline("paged_bytes", "paged", "bytes", "low", exact=True),
        Headline("paged_waste_bytes", "paged wasted", "bytes", "low", rank=2, exact=True),
        Headline("shared_bytes", "prefix shared", "bytes", "low", exact=True),
        Headline("saved_bytes", "saved", "bytes", "high", rank=1, exact=True),
        Headline("positions_saved", "positions saved", "count", "high", rank=1, exact=True),
        Headline("logit_difference", "logits differ", "small", "low", rank=3),
    )
    compares_with_full: ClassVar[bool] = False

    prefix: int = setting(512)
    own: list[int] = setting([16, 60, 130, 250, 390, 512])
    tokens: int = setting(32)

    @property
    def size(self) -> int:
        return self.prefix + max(self.own)

    def prompts(self) -> list[int]:
        return []  # no budget is measured here

    def needed_tokens(self) -> tuple[str, int]:
        return "paging.prefix + paging.own", self.size + self.tokens + len(self.own)

    def refuse(self, method: Method) -> None:
        if method.rule.budget is not None or method.recomputes:
            raise UserError(
                f"measure=paging compares memory where every token stays, and method={method.name} evicts some; "
                "leave it out, or type method=full store=paged"
            )

        if method.prefill_chunk is not None:
            raise UserError("measure=paging compares memory and reads no prompt in chunks; leave prefill.chunk out")

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.paging.shared_prefixes import measure_pages

        yield from measure_pages(context, self)
