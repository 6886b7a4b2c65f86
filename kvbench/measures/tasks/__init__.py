"""Tasks: LongBench's English sets, RULER and mathematical problems as published, scored by their own metrics."""

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


@dataclass(frozen=True)
class Tasks(Measure):
    """The first `samples` samples of the tasks `names` of a published set, contexts cut to `longest` tokens.

    path: a folder with NAME.jsonl or NAME.parquet files instead of the hub. length: which of RULER's lengths.
    answer_tokens: most tokens of an answer; None: the sample's own number.
    """

    name: ClassVar[str] = "tasks"
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("score", "score", "percent", "high"),
        Headline("score_minus_full", "above full", "signed", "high"),
        *ENGAGED,
    )
    needs_words: ClassVar[bool] = True

    set: Literal["longbench", "ruler", "math"] = "longbench"
    names: list[str] = setting(["hotpotqa"])
    samples: int = setting(50, most=100_000)
    longest: int = setting(3500)
    question: list[Literal["after", "before"]] = setting(["after"])
    template: Literal["base", "chat"] = "base"
    length: int = setting(4096)
    path: str | None = None
    answer_tokens: int | None = setting(None, most=1_000_000)

    @property
    def size(self) -> int:
        return self.longest

    @property
    def task(self) -> str | None:
        return self.names[0] if len(self.names) == 1 else None

    def cells(self) -> list[Tasks]:
        return [replace(self, names=[name]) for name in self.names]

    def needed_tokens(self) -> None:
        """Contexts come from the set, whatever the run's text is; `prepare` checks the model's positions."""

    def data_fingerprint(self, text: str) -> str:
        from kvbench.texts.task_sets import files_fingerprint

        return files_fingerprint(self)

    def prepare(self, target: Target) -> Any:
        """The samples of every task, checked to fit the model."""
        from kvbench.texts.task_sets import check_tasks

        return check_tasks(self, target.shape.max_positions, target.tokenizer, target.bos)

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.tasks.answers import answer_tasks

        yield from answer_tasks(context, self)
