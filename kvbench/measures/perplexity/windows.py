"""Perplexity through the compressed cache, and how far its predictions are from the full cache's.

A window is C tokens of context and T scored tokens. The context runs once; each method compresses it, then the scored
tokens are fed one at a time, each attending over what the method has kept. The first is scored from the prompt's last
logits, before any compression. A single forward pass would never read a compressed cache.

Two other protocols: `stream` starts from an empty cache and is as long as one likes, in the memory that the methods
keep; `chunked` feeds blocks, whose tokens see each other before the method decides: faster, and an approximation.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.record import PrefillRecord
from kvbench.cache.rotary import EXACT_ANGLES
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.perplexity import Perplexity, check_stream
from kvbench.measures.perplexity.token_scores import COMPARED, Scorer, Scores
from kvbench.measures.result import Result, engagement_rows
from kvbench.measures.statistics import (
    ENOUGH_WINDOWS,
    WORSE,
    bounds,
    mean_interval,
    units_of,
    wilson,
    worse,
    worst_decile,
    worst_decile_interval,
)
from kvbench.results.row import Row, with_flags

PIECE = 64
"""Tokens of a stream that one method scores before the next method does; the full cache's predictions of them wait."""
UNITS = {"nll": "nats", "kl": "nats", "kl_reverse": "nats", "top1": "share", "top5": "share", "nll_minus_full": "nats"}


def score_windows(context: RunContext, settings: Perplexity) -> Iterator[Result]:
    """One result with the rows of each method.

    ppl, nll, kl, kl_reverse, top1, top5; nll_minus_full with its worst decile and the share of worse samples; nll_at
    and kl_at by position; held_bytes (of a batch), engaged, kept_tokens, positions_processed.
    """
    offsets = settings.offsets(len(context.tokens))
    scores = {method.label: Scores() for method in context.methods}
    run = _stream if settings.protocol == "stream" else _after_prompt
    with context.progress.phase("perplexity", settings.tokens * len(context.methods) * len(offsets)) as advance:
        for start in range(0, len(offsets), settings.batch):
            some = offsets[start : start + settings.batch]
            ids = context.windows(some, settings.longest)
            run(context, settings, ids, scores, advance)
    done = context.remaining("perplexity")
    rows = [row for method in done for row in _rows(method, scores, context, settings)]
    yield Result(rows, _samples(done, scores, offsets, context, settings))


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
        record = prefill(context.loaded.model, ids[:, :1], [method.method.rule for method in methods])
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


def _rows(method: MethodRun, scores: dict[str, Scores], context: RunContext, settings: Perplexity) -> Iterator[Row]:
    mine, full = scores[method.label], scores.get(context.baseline.label)
    columns = {name: mine.of(name) for name in ("nll", *COMPARED)}
    nll, reference = columns["nll"], None if full is None or "nll" not in full.columns else full.of("nll")
    assert nll is not None
    if reference is not None and reference.shape == nll.shape:
        columns["nll_minus_full"] = nll - reference
    base = replace(
        method.row,
        measure="perplexity",
        protocol=settings.protocol_name,
        n=nll.numel(),
        context=0 if settings.protocol == "stream" else settings.context,
        batch=min(settings.batch, settings.windows),
        stride=_stride(len(context.tokens), settings),
        note=_note(method, mine, context, settings),
    )
    base = with_flags(base, *_flags(context, settings))
    for metric, values in columns.items():
        if values is not None:
            yield from _mean_rows(base, metric, values, context.seed)
            if metric in ("nll", "kl") and settings.buckets > 1:
                yield from _position_rows(base, metric, values, settings, context.seed)
    engaged, kept = float(torch.cat(mine.columns["engaged"]).mean()), sum(mine.kept) / len(mine.kept)
    yield from engagement_rows(base, engaged, kept, sum(mine.processed) / len(mine.processed))
    for metric, value, unit in (
        ("windows", float(len(nll)), "windows"),
        ("held_bytes", mine.held[0], "bytes"),
        ("scored_kept_tokens", sum(mine.scored_kept) / len(mine.scored_kept), "tokens"),
        ("scored_bytes", mine.scored_held[0], "bytes"),
    ):
        yield replace(base, metric=metric, value=value, unit=unit)
    if mine.full_16bit and sum(mine.scored_held) > 0:
        note = "bytes of a full cache in 16 bits over bytes held, slots for coming tokens included; means while scored"
        smaller = sum(mine.full_16bit) / sum(mine.scored_held)
        yield replace(base, metric="x_smaller", value=smaller, unit="x", note=f"{note}; {base.note}")


def _note(method: MethodRun, mine: Scores, context: RunContext, settings: Perplexity) -> str:
    prompt = "an empty cache" if settings.protocol == "stream" else str(settings.context)
    begun = {0: "no BOS added", 1: "the first is BOS"}.get(len(context.bos), f"the first {len(context.bos)} are BOS")
    parts = [f"{settings.windows} windows of {prompt} + {settings.tokens} tokens, {begun}"]
    if settings.protocol == "chunked":
        parts.append(f"approximate: blocks of {settings.chunk} tokens, evicted and quantised after each block only")
    if method.method.rule.sinks_in_place > 0 and settings.longest - mine.kept[0] > EXACT_ANGLES:
        parts.append(f"rotary angles in float32 lose precision beyond {EXACT_ANGLES} evicted tokens")
    if _exceeds_positions(context, settings):
        parts.append(f"beyond the model's {context.loaded.max_positions} positions")
    return "; ".join(parts)


def _flags(context: RunContext, settings: Perplexity) -> Iterator[str]:
    if settings.windows < ENOUGH_WINDOWS:
        yield "few_windows"
    if _exceeds_positions(context, settings):
        yield "beyond_positions"


def _exceeds_positions(context: RunContext, settings: Perplexity) -> bool:
    limit = context.loaded.max_positions
    return limit is not None and settings.longest > limit


def _stride(tokens: int, settings: Perplexity) -> int | None:
    offsets = settings.offsets(tokens)
    return offsets[1] - offsets[0] if len(offsets) > 1 else None


def _mean_rows(base: Row, metric: str, values: Tensor, seed: int) -> Iterator[Row]:
    """The mean of values [W, T] with its interval, and what goes with it: ppl, or the samples that got worse."""
    units = units_of(values.numpy())
    mean, interval = units.mean, mean_interval(units, seed)
    if UNITS[metric] == "share" and mean in (0, 1):  # a bootstrap of equal values has no width
        interval = wilson(round(mean * values.numel()), values.numel())
    here = replace(base, note=f"{base.note}; {units.text}")
    if not math.isfinite(mean):
        here = with_flags(here, "not_finite")
    if metric == "nll":
        yield replace(here, metric="ppl", value=exp(mean), unit="", **bounds(interval, exp))
    if metric == "nll_minus_full" and interval is not None and interval[1] < 0:
        here = with_flags(here, "better_than_full")
    yield replace(here, metric=metric, value=mean, unit=UNITS[metric], **bounds(interval))
    if metric != "nll_minus_full":
        return
    sample = "window" if units.of_windows else f"block of {units.length} scored tokens"
    count, n = worse(units)
    yield replace(
        base,
        metric="nll_minus_full_worst_decile",
        value=worst_decile(units),
        unit="nats",
        n=n,
        note=f"mean of the worst tenth; a sample is a {sample}",
        **bounds(worst_decile_interval(units, seed)),
    )
    yield replace(
        base,
        metric="worse_share",
        value=count / n,
        unit="share",
        n=n,
        **bounds(wilson(count, n)),
        note=f"samples more than {WORSE} nats above full; a sample is a {sample}",
    )


def _position_rows(base: Row, metric: str, values: Tensor, settings: Perplexity, seed: int) -> Iterator[Row]:
    """The mean by position: `buckets` parts of the scored tokens, each at the position of its first one."""
    width = math.ceil(settings.tokens / settings.buckets)
    for start in range(0, settings.tokens, width):
        units = units_of(values[:, start : start + width].numpy())
        yield replace(
            base,
            metric=f"{metric}_at",
            position=settings.prompt + start,
            value=units.mean,
            unit="nats",
            n=int(units.counts.sum()),
            note=f"{width} positions from each on; {units.text}",
            **bounds(mean_interval(units, seed)),
        )


def exp(nats: float) -> float:
    """e ** nats; infinite where that is no float any more."""
    return math.inf if nats > 700 else math.exp(nats)


def _samples(
    methods: list[MethodRun], scores: dict[str, Scores], offsets: list[int], context: RunContext, settings: Perplexity
) -> list[dict[str, object]]:
    samples = []
    for w, offset in enumerate(offsets):
        ids = context.window(offset, settings.longest).tolist()
        sample: dict[str, object] = {
            "measure": "perplexity",
            "protocol": settings.protocol_name,
            "window": w,
            "offset": offset,
            "context": settings.longest - settings.tokens,
            "tokens": settings.tokens,
            "sha256": token_hash(ids),
            "methods": [
                {
                    "method": method.row.method,
                    "store": method.row.store,
                    "knobs": method.knobs,
                    **{name: scores[method.label].of_window(name, w) for name in ("nll", *COMPARED)},
                }
                for method in methods
            ],
        }
        if context.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples


def token_hash(ids: list[int]) -> str:
    """sha256 of token ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
