"""Perplexity: how well the next token is predicted through the compressed cache, and how far from the full cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import UserError
from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.measures.context import MethodRun, RunContext
    from kvbench.measures.result import Result
    from kvbench.measures.target import Target
    from kvbench.measures.verification import Verification

Protocol = Literal["prefill_decode", "stream", "chunked"]


@dataclass(frozen=True)
class Perplexity(Measure):
    """`windows` windows of `context` prompt tokens and `tokens` scored ones, `batch` windows at a time.

    protocol: `prefill_decode` scores token by token after the prompt; `stream` token by token from an empty cache, and
    `context` plays no part; `chunked` as the first, in blocks of `chunk` tokens. buckets: parts of the scored tokens
    that are reported apart as well.
    """

    name: ClassVar[str] = "perplexity"
    knows_future: ClassVar[bool] = True
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("ppl", "ppl", "fixed2", "low"),
        Headline("nll_minus_full", "ΔNLL", "signed", "low"),
        Headline("kl", "KL", "small", "low", rank=1),
        Headline("gap_closed_kl", "gap closed (KL)", "percent", "high", rank=1),
        Headline("top1", "top-1", "percent", "high", rank=1),
        Headline("x_smaller", "x smaller than 16-bit", "x", "high", exact=True),
        Headline("windows", "windows", "count", folds=True),
        Headline("scored_kept_tokens", "kept while scored", "count", rank=1, folds=True),
        Headline("gap_closed_nll", "gap closed (NLL)", "percent", "high", rank=2),
        Headline("top5", "top-5", "percent", "high", rank=2),
        Headline("kl_reverse", "reverse KL", "small", "low", rank=2),
        Headline("nll_minus_full_worst_decile", "worst tenth", "signed", "low", rank=2),
        Headline("worse_share", "worse", "percent", "low", rank=2),
        *ENGAGED,
    )

    context: int = setting(3072)
    tokens: int = setting(128)
    windows: int = setting(2, most=100_000)
    batch: int = setting(8, most=4096)
    protocol: Protocol = "prefill_decode"
    chunk: int = setting(64)
    buckets: int = setting(4)

    @property
    def prompt(self) -> int:
        """Tokens that are fed before the first is scored; a stream needs one."""
        return 1 if self.protocol == "stream" else self.context

    @property
    def longest(self) -> int:
        """Tokens of a window."""
        return self.prompt + self.tokens

    @property
    def step(self) -> int:
        """Tokens in one forward."""
        return self.chunk if self.protocol == "chunked" else 1

    @property
    def protocol_name(self) -> str:
        """The protocol as rows name it: blocks of another size are another protocol."""
        return f"chunked{self.chunk}" if self.protocol == "chunked" else self.protocol

    @property
    def size(self) -> int:
        """Tokens of the prompt, or of a stream."""
        return self.tokens if self.protocol == "stream" else self.context

    def prompts(self) -> list[int]:
        return [self.size]

    def needed_tokens(self) -> tuple[str, int]:
        streamed = self.protocol == "stream"
        return "perplexity.tokens" if streamed else "perplexity.context + perplexity.tokens", self.longest

    def may_exceed_positions(self) -> bool:
        return self.protocol == "stream"

    def sample_limit(self, lengths: Sequence[int]) -> tuple[str, int, int]:
        each = 1 + (min(lengths) - self.longest) // self.tokens
        return "perplexity.windows", self.windows, each * len(lengths)

    def offsets(self, lengths: Sequence[int]) -> list[int]:
        """First token of each window among the texts' tokens: see `kvbench.texts.tokens.spread`."""
        from kvbench.texts.tokens import spread

        return spread(lengths, self.windows, self.longest)

    def scored_spans(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        return [(offset + self.prompt, offset + self.longest) for offset in self.offsets(lengths)]

    def refuse(self, method: Method) -> None:
        if self.protocol == "stream":
            check_stream(method)

    def beside(self, methods: Sequence[MethodRun], everyone: Sequence[MethodRun]) -> list[MethodRun]:
        """The full cache, and the floors and ceilings of the gap closed."""
        from kvbench.measures.perplexity.bounds import bounds_of

        pairs = [pair for method in methods if (pair := bounds_of(method, everyone)) is not None]
        bounds = [one for pair in pairs for one in pair]
        return [one for one in everyone if one.is_baseline or one in bounds]

    def prepare(self, target: Target) -> None:
        """Raise UserError for fewer windows than texts, and for a stream that would score tokens which begin a text
        instead of belonging to it."""
        if self.windows < (texts := len(target.stretches)):
            raise UserError(
                f"perplexity.windows={self.windows} leaves out some of the {texts} texts of data={target.text.name}; "
                f"type perplexity.windows={texts} or more"
            )
        if self.protocol == "stream" and len(target.bos) > 1:
            raise UserError(
                f"perplexity.protocol=stream scores every token but the first, and this tokenizer begins a text with "
                f"{len(target.bos)} tokens; type data.bos=none"
            )

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.perplexity.windows import score_windows

        yield from score_windows(context, self)

    def verification(self) -> Verification:
        from kvbench.measures.perplexity.verification import WindowVerification

        return WindowVerification(self)


def check_stream(method: Method) -> None:
    """Raise UserError for a method that needs a prompt, where a stream has none."""
    rule, leave = method.rule, "leave it out, or type perplexity.protocol=prefill_decode"
    if method.recomputes:
        raise UserError(f"method={method.name} runs the whole prefix at every step, too much for a stream; {leave}")
    if method.store.static_scales:
        raise UserError(
            f"{type(method.store).__name__} takes its scale, mean or channels from the prompt and a stream has "
            f"none; {leave}"
        )
    if isinstance(rule.budget, float):
        raise UserError(f"budget={rule.budget} is a share of the prompt and a stream has none; type budget=256")
    if rule.budget is not None and not rule.holds_budget:
        raise UserError(
            f"method={method.name} with decode=append cuts the prompt only and a stream has none; "
            f"type decode=evict, or {leave}"
        )
    if rule.ragged_heads:
        raise UserError(
            f"method={method.name} divides the budget between heads by a prompt and a stream has none; {leave}"
        )
    if rule.sees_future:
        raise UserError(f"method={method.name} ranks a prompt's tokens and a stream has none; {leave}")
    if rule.observations() and not (rule.reads_attention or rule.rescores):
        raise UserError(f"method={method.name} decides by what it observes of a prompt and a stream has none; {leave}")
