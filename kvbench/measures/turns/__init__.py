"""Turns: a text is compressed once, then several questions are asked of the same cache."""

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
    from kvbench.texts.prompts import Prompt

TurnTask = Literal["key_value", "multi_needle", "variables", "prefix_suffix", "instruction"]


@dataclass(frozen=True)
class Turns(Measure):
    """`samples` texts of each length, and `turns` questions about each, asked of one compressed cache.

    tasks: names of `kvbench.texts.turn_tasks`. mode: `independent` restores the cache to the compressed prompt before
    each question; `conversation` goes on after the question and its right answer. question: `after` compresses the text
    before any question is known, `before` compresses the text and the first question together. template, answer_tokens,
    skip_below: as in `needle`.
    """

    name: ClassVar[str] = "turns"
    knows_future: ClassVar[bool] = True
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("hit_rate", "hits", "percent", "high"),
        Headline("hit_rate_first", "turn 1", "percent", "high"),
        Headline("hit_rate_later", "later turns", "percent", "high"),
        Headline("later_minus_first", "later above turn 1", "signed", "high"),
        Headline("hit_rate_minus_full", "above full", "signed", "high"),
        *ENGAGED,
    )
    needs_words: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    lengths: list[int] = setting([1024])
    turns: int = setting(4, most=8)
    samples: int = setting(10, most=10_000)
    tasks: list[TurnTask] = setting(["multi_needle"])
    mode: list[Literal["independent", "conversation"]] = setting(["independent"])
    question: list[Literal["after", "before"]] = setting(["after", "before"])
    template: Literal["base", "chat"] = "base"
    answer_tokens: int | None = setting(None, most=100_000)
    skip_below: float | None = setting(None, lowest=0, most=1)

    @property
    def depths(self) -> list[float]:
        """One: the places of what is hidden are drawn, so that `needle` with one depth has the same prompts."""
        return [0.0]

    @property
    def values(self) -> Literal["task"]:
        """What is hidden: each task's own kind of value."""
        return "task"

    @property
    def size(self) -> int:
        return max(self.lengths)

    @property
    def task(self) -> str | None:
        return f"{self.tasks[0]} {self.mode[0]}" if len(self.tasks) == len(self.mode) == 1 else None

    def cells(self) -> list[Turns]:
        return [
            replace(self, lengths=[length], tasks=[task], mode=[mode])
            for length in self.lengths
            for task in self.tasks
            for mode in self.mode
        ]

    def prompts(self) -> list[int]:
        return self.lengths

    def needed_tokens(self) -> tuple[str, int]:
        return "turns.lengths", self.size  # `prepare` counts questions and answers

    def most_asked_tokens(self, prompt: Prompt) -> int:
        """Positions that follow a prompt's text at most, with its questions and answers."""
        asked = [len(turn.question) + max(turn.answer_tokens, len(turn.right)) for turn in prompt.turns[: self.turns]]
        first = asked[0] if "before" in self.question else 0
        return sum(asked) if "conversation" in self.mode else first + max(asked)

    def prepare(self, target: Target) -> Any:
        """The prompts of each length: they are checked to hold what is hidden, whole."""
        from kvbench.texts.prompts import check_prompts

        limit = target.shape.max_positions
        return check_prompts(
            target.tokenizer, target.haystack, target.seed, self, limit, target.bos, self.most_asked_tokens
        )

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.turns.answers import ask_turns

        yield from ask_turns(context, self)
