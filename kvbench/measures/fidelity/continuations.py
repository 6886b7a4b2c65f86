"""Fidelity of free generation: how long a compressed cache says what the full cache says, and where it ends.

Greedy, from the same prompts. `divergence_step` counts the tokens before the first that differs; an answer that never
differs counts with its whole length, so the mean is one of steps cut off at the most that were generated. Two caches
that end by themselves at the same place never diverged. `length_ratio` compares the lengths of answers that both ended
by themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import generate
from kvbench.measures.context import Bench, Entry, Finding
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.perplexity.windows import token_hash
from kvbench.measures.question_rows import engagement
from kvbench.measures.settings import Fidelity
from kvbench.measures.statistics import Units, bounded_interval, bounds, mean_interval, wilson
from kvbench.models.load import end_tokens
from kvbench.results.row import Row


@dataclass(frozen=True)
class Answer:
    """tokens: up to and with the end-of-text token, where `ended`."""

    tokens: list[int]
    ended: bool
    engaged: bool
    kept: float


def fidelity(bench: Bench, settings: Fidelity) -> Iterator[Finding]:
    """One finding a context: rows divergence_step, diverged_share, length_ratio, engaged, kept_tokens a method."""
    for context in settings.contexts:
        offsets = prompt_offsets(len(bench.tokens), context, settings.samples)
        answers: dict[str, dict[int, Answer]] = {entry.label: {} for entry in bench.entries}
        with bench.progress.phase(f"fidelity {context}", len(offsets) * len(bench.entries)) as advance:
            for start in range(0, len(offsets), settings.batch):
                some = offsets[start : start + settings.batch]
                _answer(bench, settings, context, some, start, answers)
                advance(len(some) * len(bench.entries))
        done = bench.alive("fidelity", context=context)
        rows = [row for entry in done for row in _rows(bench, entry, settings, context, answers)]
        yield Finding(rows, _samples(bench, done, offsets, context, answers))


def prompt_offsets(tokens: int, context: int, samples: int) -> list[int]:
    """First token of each prompt, evenly spread over the text."""
    return [i * (tokens - context) // max(1, samples - 1) for i in range(samples)]


def _answer(
    bench: Bench,
    settings: Fidelity,
    context: int,
    offsets: list[int],
    first: int,
    answers: dict[str, dict[int, Answer]],
) -> None:
    model, ends = bench.loaded.model, end_tokens(bench.loaded)
    ids = torch.stack([bench.window(o, context) for o in offsets]).to(bench.loaded.device)

    def answer(entry: Entry, cache: AnyCache) -> None:
        # Past the natural end too: how long a cache runs must not depend on what it shares a batch with.
        said = generate(model, None, cache, settings.tokens).tolist()
        for i, tokens in enumerate(said):
            stop = next((t + 1 for t, token in enumerate(tokens) if token in ends), None)
            answers[entry.label][first + i] = Answer(
                tokens[:stop], stop is not None, cache.has_compressed, cache.kept_tokens
            )

    each_cache(bench, ids, answer, settings.tokens, 1, "fidelity", context=context)


def divergence(mine: list[int], full: list[int]) -> int | None:
    """Tokens before the first that differs; None where nothing does."""
    pairs = zip(mine, full, strict=False)
    found = next((t for t, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(mine), len(full)) if found is None and len(mine) != len(full) else found


def _rows(
    bench: Bench, entry: Entry, settings: Fidelity, context: int, answers: dict[str, dict[int, Answer]]
) -> Iterator[Row]:
    mine, full = answers[entry.label], answers.get(bench.baseline.label, {})
    base = replace(
        entry.row,
        measure="fidelity",
        protocol="greedy",
        context=context,
        batch=min(settings.batch, settings.samples),
        n=len(mine),
    )
    if len(full) == len(mine):
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
            **bounds(bounded_interval(units, 0.0, settings.tokens, bench.seed)),
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
                **bounds(mean_interval(units, bench.seed)),
            )
    yield from engagement(base, mine.values())


def _samples(
    bench: Bench, entries: list[Entry], offsets: list[int], context: int, answers: dict[str, dict[int, Answer]]
) -> list[dict[str, Any]]:
    full = answers.get(bench.baseline.label, {})
    samples = []
    for i, offset in enumerate(offsets):
        ids = bench.window(offset, context).tolist()
        methods = []
        for entry in entries:
            answer = answers[entry.label][i]
            step = divergence(answer.tokens, full[i].tokens) if i in full else None
            methods.append(
                {
                    "method": entry.row.method,
                    "store": entry.row.store,
                    "knobs": entry.knobs,
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
            "context": context,
            "sha256": token_hash(ids),
            "methods": methods,
        }
        if bench.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples
