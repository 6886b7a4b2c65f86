"""Published tasks through a compressed cache: LongBench's English sets and RULER's, scored by their own metrics.

The context is prefilled and compressed; the question comes afterwards, as tokens fed through the cache (or before, as
part of what is compressed), and the answer is generated greedily. Contexts beyond `tasks.longest` tokens lose their
middle, as LongBench does it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import continuation
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.question_rows import (
    Answers,
    above_full,
    answer_of,
    answers_of,
    engagement,
    finite_flags,
    mean_over,
)
from kvbench.measures.result import Result
from kvbench.measures.tasks import Tasks
from kvbench.models.load import end_tokens
from kvbench.results.row import Row, with_flags
from kvbench.texts.answer_metrics import WITHOUT_CHAT
from kvbench.texts.task_sets import SCORES, Sample, encode, load_samples
from kvbench.texts.templates import Template, template_of
from kvbench.texts.tokens import token_hash


def answer_tasks(context: RunContext, settings: Tasks) -> Iterator[Result]:
    """One result a task: rows score, score_minus_full, engaged, kept_tokens a method and time of the question."""
    for name in settings.names:
        samples = context.prepared.get("tasks", {}).get(name) or load_samples(settings, name)
        kind = "base" if name in WITHOUT_CHAT else settings.template
        template = template_of(context.loaded.tokenizer, kind)
        answers: Answers = {(method.label, when): {} for method in context.methods for when in settings.question}
        bos = context.bos if kind == "base" else ()  # a chat template brings its own
        prompts = [encode(context.loaded.tokenizer, sample, settings.longest, template, bos) for sample in samples]
        work = len(samples) * len(settings.question) * len(context.methods)
        with context.progress.phase(f"{settings.set} {name}", work) as advance:
            for when in settings.question:
                for i, (sample, (ids, question)) in enumerate(zip(samples, prompts, strict=True)):
                    _ask(context, settings, name, when, i, sample, ids, question, answers)
                    advance(len(context.methods))
        done = context.remaining("tasks", **place(settings, name))
        rows = [
            row
            for method in done
            for when in settings.question
            for row in _rows(context, method, settings, name, when, template, answers)
        ]
        yield Result(
            rows,
            [
                _record(context, done, settings, name, when, i, sample, prompts[i], answers)
                for when in settings.question
                for i, sample in enumerate(samples)
            ],
        )


def place(settings: Tasks, name: str) -> dict[str, Any]:
    """What tells a task's rows from another's."""
    return {"context": settings.longest, "protocol": f"{settings.set}/{name}"}


def _ask(
    context: RunContext,
    settings: Tasks,
    name: str,
    when: str,
    i: int,
    sample: Sample,
    prompt: list[int],
    question: list[int],
    answers: Answers,
) -> None:
    model, device = context.loaded.model, context.loaded.device
    ids = torch.tensor([prompt + question if when == "before" else prompt], device=device)
    fed = torch.tensor([question], device=device) if when == "after" and question else None
    step, ends = 0 if fed is None else fed.shape[1], end_tokens(context.loaded)

    def answer(method: MethodRun, cache: AnyCache) -> None:
        said = continuation(model, fed, cache, sample.answer_tokens, ends)

        def score(text: str) -> float:
            return SCORES[settings.set](name, text, sample.references, sample.classes)

        answers[method.label, when][i] = answer_of(context.loaded.tokenizer, said, 0, ends, cache.kept_tokens, score)

    each_cache(context, ids, answer, step + sample.answer_tokens, max(1, step), "tasks", **place(settings, name))


def _rows(
    context: RunContext, method: MethodRun, settings: Tasks, name: str, when: str, template: Template, answers: Answers
) -> Iterator[Row]:
    mine, full = answers[method.label, when], answers.get((context.baseline.label, when), {})
    base = replace(
        method.row,
        measure="tasks",
        question=when,
        batch=1,
        n=len(mine),
        dataset=settings.set,
        **place(settings, name),
        note=template.sha256 and f"chat template {template.sha256[:12]}",
    )
    if template.sha256 is not None:
        base = replace(base, bos=None)  # the template brings its own
    scores, paired = [answer.score for answer in mine.values()], len(full) == len(mine)
    base = with_flags(base, *finite_flags(mine.values()))
    if paired and not any(answer.score for answer in full.values()):
        base = with_flags(base, "uninformative")
    yield replace(base, metric="score", unit="share", **mean_over(scores, context.seed))
    if paired and not method.is_baseline:
        theirs = [full[i].score for i in mine]
        paired_base = with_flags(base, *finite_flags(full.values()))
        yield above_full(replace(paired_base, metric="score_minus_full"), scores, theirs, context.seed)
    yield from engagement(base, mine.values())


def _record(
    context: RunContext,
    methods: list[MethodRun],
    settings: Tasks,
    name: str,
    when: str,
    i: int,
    sample: Sample,
    prompt: tuple[list[int], list[int]],
    answers: Answers,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "measure": "tasks",
        "set": settings.set,
        "task": name,
        "sample": i,
        "question": when,
        "tokens": len(prompt[0]),
        "sha256": token_hash(prompt[0] + prompt[1]),
        "references": sample.references,
        "methods": answers_of(methods, answers, when, i, "score"),
    }
    if context.save_tokens:
        found["ids"], found["question_ids"] = prompt
    return found
