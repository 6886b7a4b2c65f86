"""Perplexity through the compressed cache, and how far its predictions are from the full cache's.

A window is C tokens of context and T scored tokens. The context runs once; each method compresses it, then the scored
tokens are fed one at a time, each attending over what the method has kept. The first is scored from the prompt's last
logits, which no method has touched yet. A single forward pass would never touch a compressed cache.

Two other protocols: `stream` starts from an empty cache and is as long as one likes, in the memory that the methods
keep; `chunked` feeds blocks, whose tokens see each other before the method decides: faster, and an approximation.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.record import PrefillRecord
from kvbench.cache.rotary import EXACT_ANGLES
from kvbench.errors import UserError
from kvbench.measures.context import Bench, Entry, Finding
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.perplexity.token_scores import COMPARED, Scorer, Scores
from kvbench.measures.settings import Perplexity
from kvbench.measures.statistics import (
    WORSE,
    bounds,
    mean_interval,
    units_of,
    wilson,
    worse,
    worst_decile,
    worst_decile_interval,
)
from kvbench.results.row import Row

PIECE = 64
"""Tokens of a stream that one method scores before the next one's turn: the full cache's predictions of them wait."""
UNITS = {"nll": "nats", "kl": "nats", "kl_reverse": "nats", "top1": "share", "top5": "share", "nll_minus_full": "nats"}


def perplexity(bench: Bench, settings: Perplexity) -> Iterator[Finding]:
    """One finding, a method: rows ppl, nll, kl, kl_reverse, top1, top5, nll_minus_full with its worst decile and share
    of worse samples, nll_at and kl_at by position, held_bytes (of a batch), engaged, kept_tokens."""
    offsets = window_offsets(len(bench.tokens), settings)
    scores = {entry.label: Scores() for entry in bench.entries}
    run = _stream if settings.protocol == "stream" else _after_prompt
    with bench.progress.phase("perplexity", settings.tokens * len(bench.entries) * len(offsets)) as advance:
        for start in range(0, len(offsets), settings.batch):
            some = offsets[start : start + settings.batch]
            ids = torch.stack([bench.window(o, settings.longest) for o in some]).to(bench.loaded.device)
            run(bench, settings, ids, scores, advance)
    done = bench.alive("perplexity")
    rows = [row for entry in done for row in _rows(entry, scores, bench, settings)]
    yield Finding(rows, _samples(done, scores, offsets, bench, settings))


def window_offsets(tokens: int, settings: Perplexity) -> list[int]:
    """First token of each window: evenly spread over the text, never overlapping where the text is long enough."""
    if settings.windows == 1:
        return [0]
    stride = (tokens - settings.longest) / (settings.windows - 1)
    return [int(i * stride) for i in range(settings.windows)]


def check_stream(method: Method) -> None:
    """Raise UserError for a method that needs a prompt, where a stream has none."""
    rule, leave = method.rule, "leave it out, or type perplexity.protocol=prefill_decode"
    if method.recomputes:
        raise UserError(f"method={method.name} runs the whole prefix at every step, too much for a stream; {leave}")
    if method.store.static_scales:
        raise UserError(
            f"{type(method.store).__name__} fixes its scale by the prompt and a stream has none: all would "
            f"be cut off at what its first token needs; {leave}"
        )
    if isinstance(rule.budget, float):
        raise UserError(f"budget={rule.budget} is a share of the prompt and a stream has none; type budget=256")
    if rule.budget is not None and not rule.holds_budget:
        raise UserError(
            f"method={method.name} with decode=append cuts the prompt only and a stream has none; "
            f"type decode=evict, or {leave}"
        )
    if rule.ragged_heads:
        raise UserError(f"method={method.name} settles the shares of heads by a prompt and a stream has none; {leave}")
    if rule.observations() and not rule.reads_attention:
        raise UserError(f"method={method.name} decides by what it observes of a prompt and a stream has none; {leave}")


def _after_prompt(
    bench: Bench, settings: Perplexity, ids: Tensor, scores: dict[str, Scores], advance: Callable[[int], None]
) -> None:
    """Each method in turn: its cache of the prompt, then all scored tokens."""
    full: list[Tensor] = []

    def score(entry: Entry, cache: AnyCache) -> None:
        scorer = Scorer(bench, entry, cache, ids[:, settings.prompt :], settings.step)
        mine: list[Tensor] = []
        scorer.score(settings.tokens, mine if entry.is_baseline else full)
        _close(bench, settings, scorer, scores[entry.label])
        full.extend(mine)
        advance(settings.tokens * len(ids))

    each_cache(
        bench,
        ids[:, : settings.context],
        score,
        settings.tokens,
        min(settings.step, settings.tokens),
        "perplexity",
        context=settings.context,
    )


def _stream(
    bench: Bench, settings: Perplexity, ids: Tensor, scores: dict[str, Scores], advance: Callable[[int], None]
) -> None:
    """All methods piece by piece, so that nothing grows with the length but what a method keeps.

    A cache of one token, which attends to nothing but itself, is what decoding from an empty cache has after one step.
    """
    entries = bench.alive("perplexity")
    record: PrefillRecord | None = None
    with bench.shared(entries, "perplexity", context=0):
        record = prefill(bench.loaded.model, ids[:, :1], [entry.method.rule for entry in entries])
    scorers: list[Scorer] = []
    for entry in entries if record is not None else []:
        with bench.cell(entry, "perplexity", context=0):
            check_stream(entry.method)
            cache = build_cache(
                bench.loaded.model,
                entry.method,
                record,
                max_new_tokens=settings.tokens,
                max_step=min(settings.step, settings.tokens),
                kernel=bench.kernel,
            )
            scorers.append(Scorer(bench, entry, cache, ids[:, settings.prompt :], settings.step))
    for start in range(0, settings.tokens, PIECE):
        count = min(PIECE, settings.tokens - start)
        full: list[Tensor] = []
        for scorer in list(scorers):
            with bench.cell(scorer.entry, "perplexity", context=0):
                scorer.score(count, full)
            if bench.failed(scorer.entry, "perplexity"):
                scorers.remove(scorer)
                if scorer.entry.is_baseline:
                    full.clear()
            advance(count * len(ids))
    for scorer in scorers:
        _close(bench, settings, scorer, scores[scorer.entry.label])


def _close(bench: Bench, settings: Perplexity, scorer: Scorer, scores: Scores) -> None:
    first = len(scores.kept) * settings.batch
    windows = range(first, first + len(scorer.targets))
    context = 0 if settings.protocol == "stream" else settings.context
    bench.note_kept(scorer.entry, scorer.cache, windows, "perplexity", protocol=settings.name, context=context)
    scorer.close(scores)


def _rows(entry: Entry, scores: dict[str, Scores], bench: Bench, settings: Perplexity) -> Iterator[Row]:
    mine, full = scores[entry.label], scores.get(bench.baseline.label)
    columns = {name: mine.of(name) for name in ("nll", *COMPARED)}
    nll, reference = columns["nll"], None if full is None or "nll" not in full.columns else full.of("nll")
    assert nll is not None
    if reference is not None and reference.shape == nll.shape:
        columns["nll_minus_full"] = nll - reference
    base = replace(
        entry.row,
        measure="perplexity",
        protocol=settings.name,
        n=nll.numel(),
        context=0 if settings.protocol == "stream" else settings.context,
        batch=min(settings.batch, settings.windows),
        stride=_stride(len(bench.tokens), settings),
        note=_note(entry, mine, bench, settings),
    )
    for metric, values in columns.items():
        if values is not None:
            yield from _mean_rows(base, metric, values, bench.seed)
            if metric in ("nll", "kl") and settings.buckets > 1:
                yield from _position_rows(base, metric, values, settings, bench.seed)
    for metric, value, unit in (
        ("engaged", float(torch.cat(mine.columns["engaged"]).mean()), "share"),
        ("held_bytes", mine.held[0], "bytes"),
        ("kept_tokens", sum(mine.kept) / len(mine.kept), "tokens"),
        ("positions_processed", sum(mine.processed) / len(mine.processed), "positions"),
    ):
        yield replace(base, metric=metric, value=value, unit=unit)


def _note(entry: Entry, mine: Scores, bench: Bench, settings: Perplexity) -> str:
    prompt = "an empty cache" if settings.protocol == "stream" else str(settings.context)
    begun = "no BOS added" if bench.bos is None else "the first is BOS"
    parts = [f"{settings.windows} windows of {prompt} + {settings.tokens} tokens, {begun}"]
    if settings.protocol == "chunked":
        parts.append(f"approximate: blocks of {settings.chunk} tokens, evicted and quantised after each block only")
    if entry.method.rule.sinks_in_place > 0 and settings.longest - mine.kept[0] > EXACT_ANGLES:
        parts.append(f"float32 angles beyond {EXACT_ANGLES} evicted tokens")
    limit = bench.loaded.max_positions
    if limit is not None and settings.longest > limit:
        parts.append(f"beyond the model's {limit} positions")
    return "; ".join(parts)


def _stride(tokens: int, settings: Perplexity) -> int | None:
    offsets = window_offsets(tokens, settings)
    return offsets[1] - offsets[0] if len(offsets) > 1 else None


def _mean_rows(base: Row, metric: str, values: Tensor, seed: int) -> Iterator[Row]:
    """The mean of values [W, T] with its interval, and what goes with it: ppl, or the samples that got worse."""
    units = units_of(values.numpy())
    mean, interval = units.mean, mean_interval(units, seed)
    if UNITS[metric] == "share" and mean in (0, 1):  # nothing to draw, and no certainty
        interval = wilson(round(mean * values.numel()), values.numel())
    here = replace(base, note=f"{base.note}; {units.text}")
    if metric == "nll":
        yield replace(here, metric="ppl", value=exp(mean), unit="", **bounds(interval, exp))
    better = metric == "nll_minus_full" and interval is not None and interval[1] < 0
    yield replace(
        here,
        metric=metric,
        value=mean,
        unit=UNITS[metric],
        **bounds(interval),
        note=f"better than full beyond the interval; {here.note}" if better else here.note,
    )
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
    entries: list[Entry], scores: dict[str, Scores], offsets: list[int], bench: Bench, settings: Perplexity
) -> list[dict[str, object]]:
    samples = []
    for w, offset in enumerate(offsets):
        ids = bench.window(offset, settings.longest).tolist()
        sample: dict[str, object] = {
            "measure": "perplexity",
            "protocol": settings.name,
            "window": w,
            "offset": offset,
            "context": settings.longest - settings.tokens,
            "tokens": settings.tokens,
            "sha256": token_hash(ids),
            "methods": [
                {
                    "method": entry.row.method,
                    "store": entry.row.store,
                    "knobs": entry.knobs,
                    **{name: scores[entry.label].of_window(name, w) for name in ("nll", *COMPARED)},
                }
                for entry in entries
            ],
        }
        if bench.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples


def token_hash(ids: list[int]) -> str:
    """sha256 of token ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
