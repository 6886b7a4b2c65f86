"""Free generation: how long it equals the full cache's, how long it gets, and whether it ends in a loop."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import continuation
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.question_rows import engagement, finite_flags, tokens_of
from kvbench.measures.result import Result
from kvbench.measures.statistics import Units, bounded_interval, bounds, wilson
from kvbench.measures.stream import FREE, Stream
from kvbench.measures.stream.loops import FEWEST_BLOCKS, FEWEST_TOKENS, LONGEST_BLOCK, loop_start
from kvbench.models.load import end_tokens
from kvbench.results.row import Row, with_flags
from kvbench.texts.tokens import spread, token_hash

LOOP = (
    f"loop: the text ends in a block of at most {LONGEST_BLOCK} tokens, repeated at least {FEWEST_BLOCKS} times, "
    f"{FEWEST_TOKENS} tokens or more"
)


@dataclass(frozen=True)
class Generated:
    """tokens: up to and with the end of the text. engaged: share of them predicted after an eviction or quantisation.
    kept: tokens held at the end. finite: whether the logits of all tokens were."""

    tokens: list[int]
    engaged: float
    kept: float
    finite: bool


Texts = dict[str, dict[int, Generated]]
"""By method, then by number of the sample."""


def generate_freely(context: RunContext, settings: Stream, length: int) -> Result:
    """Rows divergence_step, loop_share, generated_tokens, engaged, kept_tokens of each method."""
    model, ends = context.loaded.model, end_tokens(context.loaded)
    offsets = spread(context.lengths, settings.samples, settings.prompt)
    where: dict[str, Any] = {"context": length, "protocol": FREE}
    texts: Texts = {method.label: {} for method in context.methods}
    with context.progress.phase(f"stream {FREE} {length}", len(offsets) * len(context.methods)) as advance:
        for first in range(0, len(offsets), settings.batch):
            some = offsets[first : first + settings.batch]

            def generate(method: MethodRun, cache: AnyCache, some: list[int] = some, first: int = first) -> None:
                # Generated past the end token too: kept tokens must not depend on the other rows of the batch.
                said = continuation(model, None, cache, length)
                for i in range(len(some)):
                    tokens, engaged, finite = tokens_of(said, i, ends)
                    texts[method.label][first + i] = Generated(tokens, engaged, cache.kept_tokens, finite)
                advance(len(some))

            each_cache(context, context.windows(some, settings.prompt), generate, length, 1, "stream", **where)
    done = context.remaining("stream", **where)
    rows = [row for method in done for row in _rows(context, method, settings, where, texts)]
    return Result(rows, [_sample(context, settings, done, i, offset, where, texts) for i, offset in enumerate(offsets)])


def same_tokens(mine: Sequence[int], full: Sequence[int]) -> int:
    """Tokens before the first that differs; all of `mine` where none does."""
    differ = (t for t, (a, b) in enumerate(zip(mine, full, strict=False)) if a != b)
    return next(differ, min(len(mine), len(full)))


def _rows(
    context: RunContext, method: MethodRun, settings: Stream, where: dict[str, Any], texts: Texts
) -> Iterator[Row]:
    mine, full, length = texts[method.label], texts.get(context.baseline.label, {}), where["context"]
    note = f"greedy, after {settings.prompt} tokens of text, {length} tokens at most"
    batch = min(settings.batch, len(mine))
    base = replace(method.row, measure="stream", batch=batch, n=len(mine), note=note, **where)
    base = with_flags(base, *finite_flags(mine.values()))
    if len(full) == len(mine):
        finite = [one.finite and full[i].finite for i, one in mine.items()]
        same = [same_tokens(one.tokens, full[i].tokens) for i, one in mine.items()]
        flagged = with_flags(base, *finite_flags(full.values()))
        value = _mean(same, length, context.seed) if all(finite) else {"value": math.nan}
        yield replace(flagged, metric="divergence_step", unit="tokens", **value)
    loops = sum(loop_start(one.tokens) is not None for one in mine.values())
    yield replace(
        base,
        metric="loop_share",
        value=loops / len(mine),
        unit="share",
        note=f"{note}; {LOOP}",
        **bounds(wilson(loops, len(mine))),
    )
    lengths = [len(one.tokens) for one in mine.values()]
    yield replace(base, metric="generated_tokens", unit="tokens", **_mean(lengths, length, context.seed))
    yield from engagement(base, list(mine.values()))


def _mean(counts: Sequence[int], most: int, seed: int) -> dict[str, Any]:
    """The mean of counts from 0 to `most` and its interval, as columns of a row."""
    units = Units(np.array(counts, dtype=np.float64), np.ones(len(counts)), 1, False)
    return {"value": units.mean, **bounds(bounded_interval(units, 0.0, most, seed))}


def _sample(
    context: RunContext,
    settings: Stream,
    methods: list[MethodRun],
    i: int,
    offset: int,
    where: dict[str, Any],
    texts: Texts,
) -> dict[str, Any]:
    return {
        "measure": "stream",
        "task": FREE,
        "length": where["context"],
        "sample": i,
        "offset": offset,
        "sha256": token_hash(context.window(offset, settings.prompt).tolist()),
        "methods": [
            {
                "method": method.row.method,
                "store": method.row.store,
                "knobs": method.knobs,
                "loop_start": loop_start(texts[method.label][i].tokens),
                "tokens": texts[method.label][i].tokens,
            }
            for method in methods
        ],
    }
