"""Fidelity of greedy generation: tokens until a cache first differs from the full cache, and the length of its answer.

Greedy, from the same prompts. `divergence_step` counts the tokens before the first that differs; an answer that never
differs counts with its whole length, so the mean is one of steps cut off at the most that were generated. Two caches
that end by themselves at the same place never diverged. `contextratio` compares the lengths of answers that both ended
by themselves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import continuation
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.fidelity import Fidelity
from kvbench.measures.question_rows import engagement, finite_flags, tokens_of
from kvbench.measures.result import Result
from kvbench.measures.statistics import Units, bounded_interval, bounds, mean_interval, wilson
from kvbench.models.load import end_tokens
from kvbench.results.row import Row, with_flags
from kvbench.texts.tokens import spread, token_hash


@dataclass(frozen=True)
class Answer:
    """tokens: up to and with the end-of-text token, where `ended`. engaged: share of them that were predicted after an
    eviction or a quantisation. kept: tokens held at the end. finite: whether the logits of all tokens were."""

    tokens: list[int]
    ended: bool
    engaged: float
    kept: float
    finite: bool


def continue_prompts(context: RunContext, settings: Fidelity) -> Iterator[Result]:
    """One result a context: rows divergence_step, diverged_share, length_ratio, engaged, kept_tokens a method."""
    for prompt in settings.contexts:
        offsets = spread(context.lengths, settings.samples, prompt)
        answers: dict[str, dict[int, Answer]] = {method.label: {} for method in context.methods}
        with context.progress.phase(f"fidelity {prompt}", len(offsets) * len(context.methods)) as advance:
            for start in range(0, len(offsets), settings.batch):
                some = offsets[start : start + settings.batch]
                _answer(context, settings, prompt, some, start, answers)
                advance(len(some) * len(context.methods))
        done = context.remaining("fidelity", context=prompt)
        rows = [row for method in done for row in _rows(context, method, settings, prompt, answers)]
        yield Result(rows, _samples(context, done, offsets, prompt, answers))


def _answer(
    context: RunContext,
    settings: Fidelity,
    prompt: int,
    offsets: list[int],
    first: int,
    answers: dict[str, dict[int, Answer]],
) -> None:
    model, ends = context.loaded.model, end_tokens(context.loaded)
    ids = context.windows(offsets, prompt)

    def answer(method: MethodRun, cache: AnyCache) -> None:
        # Generated past the end token too: the steps of a cache must not depend on the other rows of its batch.
        said = continuation(model, None, cache, settings.tokens)
        for i in range(len(offsets)):
            tokens, engaged, finite = tokens_of(said, i, ends)
            answers[method.label][first + i] = Answer(tokens, tokens[-1] in ends, engaged, cache.kept_tokens, finite)

    each_cache(context, ids, answer, settings.tokens, 1, "fidelity", context=prompt)


def divergence(mine: list[int], full: list[int]) -> int | None:
    """Tokens before the first that differs; None where nothing does."""
    pairs = zip(mine, full, strict=False)
    found = next((t for t, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(mine), len(full)) if found is None and len(mine) != len(full) else found


def _rows(
    context: RunContext, method: MethodRun, settings: Fidelity, prompt: int, answers: dict[str, dict[int, Answer]]
) -> Iterator[Row]:
    mine, full = answers[method.label], answers.get(context.baseline.label, {})
    base = replace(
        method.row,
        measure="fidelity",
        protocol="greedy",
        context=prompt,
        batch=min(settings.batch, settings.samples),
        n=len(mine),
    )
    base = with_flags(base, *finite_flags(mine.values()))
    undefined = [*finite_flags(mine.values()), *finite_flags(full.values())]
    if len(full) == len(mine) and undefined:
        doubtful = with_flags(base, *undefined)
        yield replace(doubtful, metric="divergence_step", value=math.nan, unit="tokens")
        yield replace(doubtful, metric="diverged_share", value=math.nan, unit="share")
    elif len(full) == len(mine):
        pairs = [(mine[i], full[i]) for i in mine]
        steps = [divergence(a.tokens, b.tokens) for a, b in pairs]
        censored = np.array([len(a.tokens) if s is None else s for s, (a, _) in zip(steps, pairs, strict=True)])
        units = Units(censored.astype(np.float64), np.ones(len(steps)), 1, False)
        left = sum(step is not None for step in steps)
        yield replace(
            base,
            metric="divergence_step",
            value=units.mean,
            unit="tokens",
            note=f"tokens before the first that differs, cut off at {settings.tokens}",
            **bounds(bounded_interval(units, 0.0, settings.tokens, context.seed)),
        )
        yield replace(
            base, metric="diverged_share", value=left / len(steps), unit="share", **bounds(wilson(left, len(steps)))
        )
        ended = [(len(a.tokens), len(b.tokens)) for a, b in pairs if a.ended and b.ended]
        if ended:
            lengths = np.array(ended, dtype=np.float64)
            units = Units(lengths[:, 0], lengths[:, 1], 1, False)
            yield replace(
                base,
                metric="length_ratio",
                value=units.mean,
                unit="x",
                n=len(ended),
                note=f"of the {len(ended)} of {len(pairs)} answers that both ended by themselves",
                **bounds(mean_interval(units, context.seed)),
            )
    yield from engagement(base, mine.values())


def _samples(
    context: RunContext,
    methods: list[MethodRun],
    offsets: list[int],
    prompt: int,
    answers: dict[str, dict[int, Answer]],
) -> list[dict[str, Any]]:
    full = answers.get(context.baseline.label, {})
    samples = []
    for i, offset in enumerate(offsets):
        ids = context.window(offset, prompt).tolist()
        found = []
        for method in methods:
            answer = answers[method.label][i]
            known = i in full and answer.finite and full[i].finite
            step = divergence(answer.tokens, full[i].tokens) if known else None
            found.append(
                {
                    "method": method.row.method,
                    "store": method.row.store,
                    "knobs": method.knobs,
                    "divergence_step": step,
                    "length": len(answer.tokens),
                    "ended": answer.ended,
                    "tokens": answer.tokens,
                }
            )
        sample: dict[str, Any] = {
            "measure": "fidelity",
            "sample": i,
            "offset": offset,
            "context": prompt,
            "sha256": token_hash(ids),
            "methods": found,
        }
        if context.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples
