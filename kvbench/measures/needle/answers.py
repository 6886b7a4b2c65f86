"""Retrieval: something hidden in a long text, asked for after (or before) the text has been compressed.

Lengths are exact tokens of context, what is hidden included, the question not. What is hidden and asked for, and what
counts as an answer: see `kvbench.texts.needle_tasks`.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import continuation
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.needle import Needle
from kvbench.measures.question_rows import (
    Answer,
    Answers,
    above_full,
    answer_text,
    answers_of,
    engagement,
    finite_flags,
    mean_over,
    tokens_of,
)
from kvbench.measures.result import Result
from kvbench.measures.statistics import bounds, wilson
from kvbench.models.load import end_tokens
from kvbench.results.row import Row, with_flags
from kvbench.texts.needle_tasks import is_hit, recall
from kvbench.texts.prompts import Prompt, make_prompts, template_of
from kvbench.texts.tokens import token_hash


def ask_needles(context: RunContext, settings: Needle) -> Iterator[Result]:
    """One result a length, with rows a method, task and time of the question: hits and hit_rate at each depth and
    over all, hit_rate_minus_full, engaged, kept_tokens."""
    for length in settings.lengths:
        prompts = context.prepared.get("needle", {}).get(length) or make_prompts(
            context.loaded.tokenizer, context.haystack, context.seed, settings, length, context.bos
        )
        answers: Answers = {(method.label, when): {} for method in context.methods for when in settings.question}
        work = len(prompts) * len(context.methods) * len(settings.question)
        with context.progress.phase(f"needle {length}", work) as advance:
            for when in settings.question:
                for batch in _batches(prompts, settings.batch):
                    _ask(context, when, length, [prompts[i] for i in batch], batch, answers)
                    advance(len(batch) * len(context.methods))
        done = context.remaining("needle", context=length)
        rows = [
            row
            for method in done
            for task in settings.tasks
            for when in settings.question
            for row in _rows(context, method, settings, when, task, length, prompts, answers)
        ]
        samples = [
            _sample(context, done, i, prompt, when, answers)
            for when in settings.question
            for i, prompt in enumerate(prompts)
        ]
        yield Result(rows, samples)


def _batches(prompts: list[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of prompts that can run together: questions of one length in tokens, answers of one length."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, prompt in enumerate(prompts):
        alike.setdefault((len(prompt.question), prompt.answer_tokens), []).append(i)
    for indices in alike.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _ask(
    context: RunContext, when: str, length: int, prompts: list[Prompt], indices: list[int], answers: Answers
) -> None:
    device, model = context.loaded.device, context.loaded.model
    ids = torch.tensor([prompt.ids for prompt in prompts], device=device)
    question = torch.tensor([prompt.question for prompt in prompts], device=device)
    if when == "before":
        ids = torch.cat([ids, question], dim=1)
    asked = question if when == "after" else None
    fed = 0 if asked is None else question.shape[1]

    ends = end_tokens(context.loaded)

    def answer(method: MethodRun, cache: AnyCache) -> None:
        # Generated past the end token too: kept tokens must not depend on the other rows of the batch.
        said = continuation(model, asked, cache, prompts[0].answer_tokens)
        for row, (i, prompt) in enumerate(zip(indices, prompts, strict=True)):
            tokens, engaged, finite = tokens_of(said, row, ends)
            text = answer_text(context.loaded.tokenizer, tokens, ends)
            found = score(prompt, text) if finite else math.nan
            answers[method.label, when][i] = Answer(text, found, engaged, cache.kept_tokens, finite)
        context.save_kept_tokens(method, cache, indices, "needle", context=length, question=when)

    each_cache(context, ids, answer, fed + prompts[0].answer_tokens, max(1, fed), "needle", context=length)


def score(prompt: Prompt, answer: str) -> float:
    """Share of the hidden values that the answer holds."""
    if prompt.draft.first_number:
        return float(is_hit(answer, prompt.draft.references[0]))
    return recall(answer, prompt.draft.references)


def _rows(
    context: RunContext,
    method: MethodRun,
    settings: Needle,
    when: str,
    task: str,
    length: int,
    prompts: list[Prompt],
    answers: Answers,
) -> Iterator[Row]:
    mine, full = answers[method.label, when], answers[context.baseline.label, when]
    of_task = [i for i, prompt in enumerate(prompts) if prompt.task.name == task]
    template = template_of(context.loaded.tokenizer, settings.template).sha256
    base = replace(
        method.row,
        measure="needle",
        question=when,
        context=length,
        protocol=task,
        batch=min(settings.batch, len(of_task)),
    )
    said = None if template is None else f"chat template {template[:12]}"
    if template is not None:
        base = replace(base, bos=None)  # the template brings its own
    depths = sorted({prompt.depth for prompt in prompts if prompt.task.name == task and prompt.depth is not None})
    groups = [(depth, [i for i in of_task if prompts[i].depth == depth]) for depth in depths]
    for depth, cell in [*groups, (None, of_task)]:
        scores, n = [mine[i].score for i in cell], len(cell)
        paired = all(i in full for i in cell)
        here = with_flags(replace(base, depth=depth, n=n, note=said), *finite_flags(mine[i] for i in cell))
        if paired and not any(full[i].score for i in cell):
            here = with_flags(here, "uninformative")
        yield replace(here, metric="hit_rate", unit="share", **_rate(scores, context.seed))
        yield replace(here, metric="hits", value=sum(scores), unit="hits")
        if paired and not method.is_baseline:
            theirs = [full[i].score for i in cell]
            here = with_flags(here, *finite_flags(full[i] for i in cell))
            yield above_full(replace(here, metric="hit_rate_minus_full"), scores, theirs, context.seed)
    of_all = replace(base, n=len(of_task), note=said)
    yield from engagement(of_all, [mine[i] for i in of_task])


def _rate(scores: list[float], seed: int) -> dict[str, Any]:
    """With Wilson's interval for hits and misses; where a prompt asks for several things, a bootstrap over prompts."""
    if all(score in (0, 1) for score in scores):
        return {"value": sum(scores) / len(scores), **bounds(wilson(round(sum(scores)), len(scores)))}
    return mean_over(scores, seed)


def _sample(
    context: RunContext, methods: Sequence[MethodRun], i: int, prompt: Prompt, when: str, answers: Answers
) -> dict[str, Any]:
    text = context.loaded.tokenizer.decode(prompt.ids + prompt.question)
    sample: dict[str, Any] = {
        "measure": "needle",
        "task": prompt.task.name,
        "length": prompt.length,
        "depth": prompt.depth,
        "sample": prompt.sample,
        "question": when,
        "references": list(prompt.draft.references),
        "sha256": token_hash(prompt.ids + prompt.question),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "methods": answers_of(methods, answers, when, i, "hit"),
    }
    if context.save_tokens:
        sample["ids"], sample["question_ids"] = prompt.ids, prompt.question
    return sample
