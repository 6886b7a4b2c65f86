"""Stream: long decodes, as reasoning models make them, where eviction happens while the text is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import UserError
from kvbench.measures.measure import ENGAGED, Measure, setting
from kvbench.measures.target import Target
from kvbench.results.headline import Headline

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.measures.context import RunContext
    from kvbench.measures.result import Result

StreamTask = Literal["running_sum", "list_copy", "state_machine", "free"]
FREE = "free"


@dataclass(frozen=True)
class Stream(Measure):
    """Texts of each length that are written through the cache, `samples` of each task, `batch` at a time.

    tasks: working-outs of `kvbench.texts.stream_tasks`, which are fed token by token and then asked about; `free`
    generates greedily after `prompt` tokens of the run's text. lengths: tokens of the working-out, or the most that are
    generated.
    """

    name: ClassVar[str] = "stream"
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("answer_rate", "answers", "percent", "high"),
        Headline("answer_nll", "answer NLL", "fixed2", "low", rank=1),
        Headline("answer_rate_minus_full", "above full", "signed", "high", rank=2),
        Headline("divergence_step", "same tokens", "significant", "high"),
        Headline("loop_share", "loops", "percent", "low"),
        Headline("generated_tokens", "length", "significant", rank=1),
        *ENGAGED,
    )
    needs_words: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    lengths: list[int] = setting([1024], lowest=256)
    tasks: list[StreamTask] = setting(["running_sum", "list_copy", "state_machine", "free"])
    samples: int = setting(8, most=10_000)
    batch: int = setting(8, most=4096)
    prompt: int = setting(64)

    @property
    def size(self) -> int:
        return max(self.lengths)

    @property
    def task(self) -> str | None:
        return self.tasks[0] if len(self.tasks) == 1 else None

    def cells(self) -> list[Stream]:
        return [replace(self, lengths=[length], tasks=[task]) for length in self.lengths for task in self.tasks]

    def needed_tokens(self) -> None:
        """`prepare` checks the positions; only `free` reads the run's text, `prompt` tokens of it."""

    def refuse(self, method: Method) -> None:
        """Raise UserError for a method that could not evict while the text is written."""
        rule, leave = method.rule, "leave stream out of measure="
        if method.recomputes:
            raise UserError(f"method={method.name} runs the whole prefix at every step, too much for a stream; {leave}")
        if isinstance(rule.budget, float):
            raise UserError(
                f"budget={rule.budget} is a share of the prompt, and a stream's prompt is short; type budget=256"
            )
        if rule.budget is not None and not rule.holds_budget:
            raise UserError(
                f"method={method.name} with decode=append cuts the prompt only, and a stream is written after it; "
                f"type decode=evict, or {leave}"
            )
        if method.store.static_scales:
            raise UserError(
                f"{type(method.store).__name__} takes its scale from the prompt, which is short in a stream; {leave}"
            )

    def prepare(self, target: Target) -> Any:
        """The samples of each task and length. Raises UserError where they do not fit the model or the text."""
        from kvbench.texts.stream_tasks import write

        made = {
            (task, length): [
                write(target.tokenizer, task, length, target.seed, i, target.bos) for i in range(self.samples)
            ]
            for task in self.tasks
            if task != FREE
            for length in self.lengths
        }
        longest = max((len(sample.ids) for samples in made.values() for sample in samples), default=0)
        if FREE in self.tasks:
            longest = max(longest, self.prompt + self.size)
            if self.prompt > min(target.lengths):
                raise UserError(
                    f"stream.prompt={self.prompt} is more than data={target.text.name} has; type stream.prompt=64"
                )
        limit = target.shape.max_positions
        if limit is not None and longest > limit:
            raise UserError(
                f"stream.lengths={self.size} needs {longest} positions with prompt and answers, and {target.spec.name} "
                f"has {limit}; type stream.lengths=[{self.size - longest + limit}] or less"
            )
        return made

    def run(self, context: RunContext) -> Iterator[Result]:
        from kvbench.measures.stream.free import generate_freely
        from kvbench.measures.stream.working_out import write_and_ask

        for length in self.lengths:
            for task in self.tasks:
                yield (
                    generate_freely(context, self, length)
                    if task == FREE
                    else write_and_ask(context, self, task, length)
                )
