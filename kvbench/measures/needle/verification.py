"""Retrieval, verified: prompts made again, rows recomputed from hits, batches of prompts asked again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.measures.context import RunContext
from kvbench.measures.needle import Needle
from kvbench.measures.needle.answers import ask_batch, batches_of
from kvbench.measures.needle.rows import Asked, needle_rows, prompt_record
from kvbench.measures.question_rows import Answer, Answers
from kvbench.measures.verification import Remeasured, Scored
from kvbench.results.row import Row
from kvbench.texts.prompts import Prompt, make_prompts

OF_CACHES = ("engaged", "kept_tokens")


@dataclass(frozen=True)
class PromptVerification:
    """The prompts of one length and task: all of them with one time of the question, then with the other.

    See `kvbench.measures.verification.Verification`.
    """

    settings: Needle
    unit: str = "prompt"

    @property
    def columns(self) -> dict[str, Any]:
        return {"context": self.settings.size, "protocol": self.settings.tasks[0]}

    def records(self, context: RunContext) -> list[dict[str, Any]]:
        prompts = self._prompts(context)
        return [prompt_record(context, prompt, when) for when in self.settings.question for prompt in prompts]

    def batches(self, context: RunContext) -> list[list[int]]:
        prompts = self._prompts(context)
        alike = list(batches_of(prompts, self.settings.batch))
        starts = [i * len(prompts) for i in range(len(self.settings.question))]
        return [[start + i for i in indices] for start in starts for indices in alike]

    def rows(self, context: RunContext, scores: Sequence[Scored]) -> list[Row]:
        prompts = self._prompts(context)
        answers: Answers = {}
        for number, one in enumerate(scores):
            when, i = self._place(number, prompts)
            for label, score in one.items():
                hit = math.nan if score["hit"] is None else float(score["hit"])
                answer = Answer(str(score["answer"]), hit, 0.0, 0.0, finite=not math.isnan(hit))
                answers.setdefault((label, when), {})[i] = answer
        asked = self._asked(prompts)
        rows = [
            row
            for method in context.methods
            for when in self.settings.question
            for row in needle_rows(context, asked, method, when, answers, context.methods)
        ]
        return [row for row in rows if row.metric not in OF_CACHES]

    def again(self, context: RunContext, numbers: Sequence[int]) -> Remeasured:
        prompts = self._prompts(context)
        when, _ = self._place(numbers[0], prompts)
        answers: Answers = {(method.label, when): {} for method in context.methods}
        indices = [self._place(number, prompts)[1] for number in numbers]
        ask_batch(context, self._asked(prompts), when, indices, answers)
        found = Remeasured()
        for number, i in zip(numbers, indices, strict=True):
            given = {label: of_method[i] for (label, _), of_method in answers.items() if i in of_method}
            found.scores[number] = {label: {"hit": one.score, "answer": one.text} for label, one in given.items()}
        return found

    def _asked(self, prompts: list[Prompt]) -> Asked:
        return Asked(self.settings, self.settings.tasks[0], self.settings.size, prompts)

    def _place(self, number: int, prompts: Sequence[Prompt]) -> tuple[str, int]:
        """Time of the question and number of the prompt, from the number of the sample."""
        when, i = divmod(number, len(prompts))
        return self.settings.question[when], i

    def _prompts(self, context: RunContext) -> list[Prompt]:
        length, task = self.settings.size, self.settings.tasks[0]
        prompts = context.prepared.get("needle", {}).get(length) or make_prompts(
            context.loaded.tokenizer, context.haystack, context.seed, self.settings, length, context.bos
        )
        return [prompt for prompt in prompts if prompt.task.name == task]
