"""Error: what a compressed cache does to keys, values, attention and the residual stream, layer by layer and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.measures.context import RunContext
    from kvbench.measures.result import Result
    from kvbench.measures.target import Target


@dataclass(frozen=True)
class Error(Measure):
    """`windows` windows of `context` prompt tokens and `tokens` decoded ones; errors at `points` of the decoded tokens.

    The queries are the model's own, from one exact pass over the whole window, so all methods are asked the same.
    """

    name: ClassVar[str] = "error"
    knows_future: ClassVar[bool] = True
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("output_error", "attention output", "small", "low"),
        Headline("attention_kl", "attention KL", "small", "low"),
        Headline("residual_error", "residual stream", "small", "low"),
        Headline("kl", "KL", "small", "low"),
        Headline("key_error", "keys", "small", "low", rank=1),
        Headline("value_error", "values", "small", "low", rank=1),
        Headline("key_cosine", "key cosine", "small", "high", rank=1),
        Headline("logit_error", "logits", "small", "low", rank=1),
        Headline("logit_correlation", "logit correlation", "small", "high", rank=2),
        Headline("output_error_worst_layer", "worst layer's output", "small", "low", rank=2),
        Headline("logit_correlation_worst_layer", "worst layer's logit correlation", "small", "high", rank=2),
        *ENGAGED,
    )

    context: int = setting(1024)
    tokens: int = setting(64, lowest=2)
    windows: int = setting(10, most=100_000)
    batch: int = setting(2, most=4096)
    points: int = setting(4)

    @property
    def longest(self) -> int:
        """Tokens of a window."""
        return self.context + self.tokens

    def needed_tokens(self) -> tuple[str, int]:
        return "error.context + error.tokens", self.longest

    def sample_limit(self, lengths: Sequence[int]) -> tuple[str, int, int]:
        each = 1 + (min(lengths) - self.longest) // self.tokens
        return "error.windows", self.windows, each * len(lengths)

    def offsets(self, lengths: Sequence[int]) -> list[int]:
        """First token of each window among the texts' tokens."""
        from kvbench.texts.tokens import spread

        return spread(lengths, self.windows, self.longest)

    def scored_spans(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        return [(offset + self.context, offset + self.longest) for offset in self.offsets(lengths)]

    def evaluated(self) -> list[int]:
        """Numbers of decoded tokens after which the cache is looked at, ascending: the last is `tokens` - 1."""
        last, count = self.tokens - 1, min(self.points, self.tokens - 1)
        return sorted({1 + round((last - 1) * i / max(1, count - 1)) for i in range(count)} if count > 1 else {last})

    def refuse(self, method: Method) -> None:
        if method.kind != "slots":
            raise UserError(
                f"method={method.name} holds no slots of kvbench's own, and error looks into them; leave it out of "
                "this measure"
            )

    def prepare(self, target: Target) -> None:
        """Raise UserError for fewer windows than texts, and for latent attention, where slots hold latents."""
        if target.shape.mla:
            raise UserError(
                f"measure error compares keys and values, and {target.spec.name} caches latents; leave error out"
            )
        if self.windows < (texts := len(target.stretches)):
            raise UserError(
                f"error.windows={self.windows} leaves out some of the {texts} texts of data={target.text.name}; "
                f"type error.windows={texts} or more"
            )

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.error.windows import measure_errors

        yield from measure_errors(context, self)
