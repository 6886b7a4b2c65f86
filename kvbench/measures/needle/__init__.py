"""Needle: something hidden in a long text, and asked for after the text was compressed (or before)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.measures.target import Target
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.measures.context import RunContext
    from kvbench.measures.result import Result
    from kvbench.measures.verification import Verification

NeedleTask = Literal[
    "single_number",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_one_hop",
    "qa_two_hop",
    "key_value",
    "multi_needle",
    "variables",
    "prefix_suffix",
    "instruction",
]


@dataclass(frozen=True)
class Needle(Measure):
    """Prompts of each length with a needle at each depth, `samples` of each kind, `batch` at a time.

    tasks: names of `kvbench.texts.needle_tasks`. question: `after` compresses the cache before the question is known,
    `before` compresses context and question together. template: `chat` wraps prompts in the tokenizer's own. values:
    what is hidden, where it is not to be the task's own kind. answer_tokens: most tokens of an answer, never fewer than
    all that is asked for takes; None: the task's own number. skip_below: where the full cache's hit rate of a task
    (question after the context, if that is measured) is lower, the other methods are not measured on the task and have
    no rows of it. The full cache then runs first and alone, which costs a second prefill.
    """

    name: ClassVar[str] = "needle"
    knows_future: ClassVar[bool] = True
    headlines: ClassVar[tuple[Headline, ...]] = (Headline("hit_rate", "hits", "percent", "high"), *ENGAGED)
    needs_words: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    lengths: list[int] = setting([2048])
    depths: list[float] = setting([0.1, 0.5, 0.9], lowest=0, most=1)
    samples: int = setting(4, most=10_000)
    question: list[Literal["after", "before"]] = setting(["after"])
    batch: int = setting(4, most=4096)
    tasks: list[NeedleTask] = setting(["single_number"])
    template: Literal["base", "chat"] = "base"
    values: Literal["task", "number", "word", "uuid"] = "task"
    answer_tokens: int | None = setting(None, most=100_000)
    skip_below: float | None = setting(None, lowest=0, most=1)

    @property
    def size(self) -> int:
        return max(self.lengths)

    @property
    def task(self) -> str | None:
        return self.tasks[0] if len(self.tasks) == 1 else None

    def cells(self) -> list[Needle]:
        return [replace(self, lengths=[length], tasks=[task]) for length in self.lengths for task in self.tasks]

    def prompts(self) -> list[int]:
        return self.lengths

    def needed_tokens(self) -> tuple[str, int]:
        return "needle.lengths", self.size  # `prepare` counts question and answer

    def prepare(self, target: Target) -> Any:
        """The prompts of each length: they are checked to hold what is hidden, whole."""
        from kvbench.texts.prompts import check_prompts

        limit = target.shape.max_positions
        return check_prompts(target.tokenizer, target.haystack, target.seed, self, limit, target.bos)

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.needle.answers import ask_needles

        yield from ask_needles(context, self)

    def verification(self) -> Verification:
        from kvbench.measures.needle.verification import PromptVerification

        return PromptVerification(self)
