"""Retrieval: something hidden in a long text, asked for after (or before) the text has been compressed.

Lengths are exact tokens of context, what is hidden included, the question not. What is hidden and asked for, and what
counts as an answer: see `kvbench.texts.needle_tasks`. The rows: see `kvbench.measures.needle.rows`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import continuation
from kvbench.cache.future import Future
from kvbench.measures.baseline_first import ask_baseline_first
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.needle import Needle
from kvbench.measures.needle.rows import Asked, needle_rows, sample_of
from kvbench.measures.question_rows import Answers, answer_of, first_time
from kvbench.measures.result import Result
from kvbench.models.load import end_tokens
from kvbench.progress import Advance
from kvbench.texts.needle_tasks import score
from kvbench.texts.prompts import Prompt, make_prompts


def ask_needles(context: RunContext, settings: Needle) -> Iterator[Result]:
    """One result a length and task, with the rows of each method and time of the question."""
    for length in settings.lengths:
        prompts = context.prepared.get("needle", {}).get(length) or make_prompts(
            context.loaded.tokenizer, context.haystack, context.seed, settings, length, context.bos
        )
        for task in settings.tasks:
            of_task = [prompt for prompt in prompts if prompt.task.name == task]
            yield _ask_task(context, Asked(settings, task, length, of_task))


def _ask_task(context: RunContext, asked: Asked) -> Result:
    settings, prompts, where = asked.settings, asked.prompts, asked.where
    answers: Answers = {(method.label, when): {} for method in context.methods for when in settings.question}
    work = len(prompts) * len(context.methods) * len(settings.question)
    with context.progress.phase(f"needle {asked.task} {asked.length}", work) as advance:
        methods = ask_baseline_first(
            context,
            lambda several: _ask_methods(several, asked, answers, advance),
            lambda method: [answer.score for answer in answers[method.label, first_time(settings.question)].values()],
            settings.skip_below,
            "needle",
            f"{asked.task} {asked.length}",
            **where,
        )
    done = [method for method in context.remaining("needle", **where) if method in methods]
    rows = [
        row
        for method in done
        for when in settings.question
        for row in needle_rows(context, asked, method, when, answers, done)
    ]
    samples = [
        sample_of(context, done, i, prompt, when, answers)
        for when in settings.question
        for i, prompt in enumerate(prompts)
    ]
    return Result(rows, samples)


def _ask_methods(context: RunContext, asked: Asked, answers: Answers, advance: Advance) -> None:
    """Ask all methods of the context."""
    for when in asked.settings.question:
        for batch in batches_of(asked.prompts, asked.settings.batch):
            ask_batch(context, asked, when, batch, answers)
            advance(len(batch) * len(context.methods))


def batches_of(prompts: list[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of prompts that can run together: questions of one length in tokens, answers of one length."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, prompt in enumerate(prompts):
        alike.setdefault((len(prompt.question), prompt.answer_tokens), []).append(i)
    for indices in alike.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def ask_batch(context: RunContext, asked: Asked, when: str, indices: Sequence[int], answers: Answers) -> None:
    """Ask the prompts of these indices, one of `batches_of`, of each method; adds to `answers`."""
    model, tokenizer, device, where = context.loaded.model, context.loaded.tokenizer, context.loaded.device, asked.where
    prompts = [asked.prompts[i] for i in indices]
    ids = torch.tensor([prompt.ids for prompt in prompts], device=device)
    question = torch.tensor([prompt.question for prompt in prompts], device=device)
    if when == "before":
        ids = torch.cat([ids, question], dim=1)
    fed = question if when == "after" else None
    future = Future(_what_follows(tokenizer, prompts, question, when), asked.length)
    step, count, ends = 0 if fed is None else fed.shape[1], prompts[0].answer_tokens, end_tokens(context.loaded)

    def answer(method: MethodRun, cache: AnyCache) -> None:
        # Generated past the end token too: kept tokens must not depend on the other rows of the batch.
        said = continuation(model, fed, cache, count)
        for row, (i, prompt) in enumerate(zip(indices, prompts, strict=True)):
            scored = partial(score, prompt.turns[0].asked)
            answers[method.label, when][i] = answer_of(tokenizer, said, row, ends, cache.kept_tokens, scored)
        context.save_kept_tokens(method, cache, indices, "needle", question=when, **where)

    each_cache(context, ids, answer, step + count, max(1, step), "needle", future, **where)


def _what_follows(tokenizer: Any, prompts: Sequence[Prompt], question: Tensor, when: str) -> Tensor:
    """The tokens to come, for methods that see them: the question, unless it is in the prompt, and the right answer.

    int64 [B, n]: shorter answers repeat their last token.
    """
    right = [prompt.turns[0].asked.right_answer for prompt in prompts]
    answers = [tokenizer(text, add_special_tokens=False).input_ids for text in right]
    longest = max(map(len, answers))
    padded = question.new_tensor([answer + answer[-1:] * (longest - len(answer)) for answer in answers])
    return torch.cat([question, padded], dim=1) if when == "after" else padded
