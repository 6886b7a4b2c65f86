"""Perplexity through the compressed cache, and how far its predictions are from the full cache's.

A window is C tokens of context and T scored tokens. The context runs once; each method compresses it, then the scored
tokens are fed one at a time, each attending over what the method has kept. The first is scored from the prompt's last
logits, before any compression. A single forward pass would never read a compressed cache.

Two other protocols: `stream` starts from an empty cache and is as long as one likes, in the memory that the methods
keep; `chunked` feeds blocks, whose tokens see each other before the method decides: faster, and an approximation.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.future import Future
from kvbench.cache.record import PrefillRecord
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.perplexity import Perplexity, check_stream
from kvbench.measures.perplexity.rows import rows_of, samples_of
from kvbench.measures.perplexity.token_scores import Scorer, Scores
from kvbench.measures.result import Result

PIECE = 64
"""Tokens of a stream that one method scores before the next method does; the full cache's predictions of them wait."""


def score_windows(context: RunContext, settings: Perplexity) -> Iterator[Result]:
    """One result with the rows and samples of each method: see `kvbench.measures.perplexity.rows`."""
    offsets = settings.offsets(context.lengths)
    scores = {method.label: Scores() for method in context.methods}
    with context.progress.phase("perplexity", settings.tokens * len(context.methods) * len(offsets)) as advance:
        for start in range(0, len(offsets), settings.batch):
            _score_batch(context, settings, offsets[start : start + settings.batch], scores, advance)
    done = context.remaining("perplexity")
    rows = [row for method in done for row in rows_of(method, scores, context, settings)]
    yield Result(rows, samples_of(done, scores, context, settings))


def score_batch(context: RunContext, settings: Perplexity, offsets: list[int]) -> dict[str, Scores]:
    """The scores of each method, by label, over one batch of windows that begin at these offsets."""
    scores = {method.label: Scores() for method in context.methods}
    with context.progress.phase("perplexity", settings.tokens * len(context.methods) * len(offsets)) as advance:
        _score_batch(context, settings, offsets, scores, advance)
    return scores


def _score_batch(
    context: RunContext,
    settings: Perplexity,
    offsets: list[int],
    scores: dict[str, Scores],
    advance: Callable[[int], None],
) -> None:
    run = _stream if settings.protocol == "stream" else _after_prompt
    run(context, settings, context.windows(offsets, settings.longest), scores, advance)


def _after_prompt(
    context: RunContext, settings: Perplexity, ids: Tensor, scores: dict[str, Scores], advance: Callable[[int], None]
) -> None:
    """Each method in turn: its cache of the prompt, then all scored tokens."""
    full: list[Tensor] = []

    def score(method: MethodRun, cache: AnyCache) -> None:
        scorer = Scorer(context, method, cache, ids[:, settings.prompt :], settings.step)
        mine: list[Tensor] = []
        scorer.score(settings.tokens, mine if method.is_baseline else full)
        _close(context, settings, scorer, scores[method.label])
        full.extend(mine)
        advance(settings.tokens * len(ids))

    each_cache(
        context,
        ids[:, : settings.context],
        score,
        settings.tokens,
        min(settings.step, settings.tokens),
        "perplexity",
        future=Future(ids[:, settings.prompt :], settings.prompt),
        context=settings.context,
    )


def _stream(
    context: RunContext, settings: Perplexity, ids: Tensor, scores: dict[str, Scores], advance: Callable[[int], None]
) -> None:
    """All methods piece by piece, so that memory does not grow with the length of the stream.

    A cache of one token, which attends to nothing but itself, is what decoding from an empty cache has after one step.
    """
    methods = context.remaining("perplexity")
    record: PrefillRecord | None = None
    with context.guarded(methods, "perplexity", context=0):
        record = prefill(context.loaded.model, ids[:, :1], [method.method for method in methods])
    scorers: list[Scorer] = []
    for method in methods if record is not None else []:
        with context.guarded(method, "perplexity", context=0):
            check_stream(method.method)
            cache = build_cache(
                context.loaded.model,
                method.method,
                record,
                max_new_tokens=settings.tokens,
                max_step=min(settings.step, settings.tokens),
                kernel=context.kernel,
            )
            scorers.append(Scorer(context, method, cache, ids[:, settings.prompt :], settings.step))
    for start in range(0, settings.tokens, PIECE):
        count = min(PIECE, settings.tokens - start)
        full: list[Tensor] = []
        for scorer in list(scorers):
            with context.guarded(scorer.method, "perplexity", context=0):
                scorer.score(count, full)
            if context.has_failed(scorer.method, "perplexity"):
                scorers.remove(scorer)
                if scorer.method.is_baseline:
                    full.clear()
            advance(count * len(ids))
    for scorer in scorers:
        _close(context, settings, scorer, scores[scorer.method.label])


def _close(context: RunContext, settings: Perplexity, scorer: Scorer, scores: Scores) -> None:
    first = len(scores.kept) * settings.batch
    windows = range(first, first + len(scorer.targets))
    prompt = 0 if settings.protocol == "stream" else settings.context
    where = {"protocol": settings.protocol_name, "context": prompt}
    context.save_kept_tokens(scorer.method, scorer.cache, windows, "perplexity", **where)
    scorer.close(scores)
