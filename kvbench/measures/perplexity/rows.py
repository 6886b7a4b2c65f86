"""The rows and samples of scored windows: means over all windows, and of each text where there are several.

A method's rows: ppl, nll, kl, kl_reverse, top1, top5; nll_minus_full with its worst decile and the share of worse
samples; gap_closed_nll and gap_closed_kl; nll_at and kl_at by position; engaged, kept_tokens, positions_processed;
windows; held_bytes (of a batch), scored_kept_tokens, scored_bytes, x_smaller.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.rotary import EXACT_ANGLES
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.perplexity.bounds import gap_rows
from kvbench.measures.perplexity.token_scores import COMPARED, Scores
from kvbench.measures.result import engagement_rows
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
from kvbench.texts.tokens import Stretch, token_hash

UNITS = {"nll": "nats", "kl": "nats", "kl_reverse": "nats", "top1": "share", "top5": "share", "nll_minus_full": "nats"}


def rows_of(method: MethodRun, scores: dict[str, Scores], context: RunContext, settings: Perplexity) -> Iterator[Row]:
    """A method's rows over all windows; then, of several texts, over the windows of each."""
    windows = settings.offsets(context.lengths)
    yield from _rows(method, scores, context, settings, list(range(len(windows))))
    for stretch in context.stretches if len(context.stretches) > 1 else ():
        of_text = [i for i, offset in enumerate(windows) if stretch.start <= offset < stretch.stop]
        yield from _rows(method, scores, context, settings, of_text, stretch)


def _rows(
    method: MethodRun,
    scores: dict[str, Scores],
    context: RunContext,
    settings: Perplexity,
    windows: list[int],
    stretch: Stretch | None = None,
) -> Iterator[Row]:
    """The rows over some windows. stretch: the text that they lie in; None: all texts."""
    mine, full = scores[method.label], scores.get(context.baseline.label)
    columns = {name: _chosen(mine.of(name), windows) for name in ("nll", *COMPARED)}
    nll = columns["nll"]
    reference = None if full is None or "nll" not in full.columns else _chosen(full.of("nll"), windows)
    assert nll is not None
    if reference is not None and reference.shape == nll.shape:
        columns["nll_minus_full"] = nll - reference
    pooled = stretch is None and len(context.lengths) > 1
    base = replace(
        method.row,
        measure="perplexity",
        protocol=settings.protocol_name,
        n=nll.numel(),
        context=0 if settings.protocol == "stream" else settings.context,
        batch=min(settings.batch, settings.windows),
        stride=None if pooled else _stride(settings.offsets(context.lengths), windows),
        note=_note(method, mine, context, settings, windows),
    )
    if stretch is not None:
        base = replace(base, dataset=stretch.name)
    base = with_flags(base, *_flags(context, settings, len(windows)))
    for metric, values in columns.items():
        if values is not None:
            yield from _mean_rows(base, metric, values, context.seed)
            if metric in ("nll", "kl") and settings.buckets > 1 and stretch is None:
                yield from _position_rows(base, metric, values, settings, context.seed)
    yield from gap_rows(base, method, context, scores, windows)
    engaged, kept = float(torch.cat(mine.columns["engaged"])[windows].mean()), sum(mine.kept) / len(mine.kept)
    yield from engagement_rows(base, engaged, kept, sum(mine.processed) / len(mine.processed))
    yield replace(base, metric="windows", value=float(len(windows)), unit="windows")
    yield from _byte_rows(base, mine)


def _chosen(values: Tensor | None, windows: list[int]) -> Tensor | None:
    return None if values is None or len(windows) > len(values) else values[windows]


def _byte_rows(base: Row, mine: Scores) -> Iterator[Row]:
    """Tokens and bytes of the caches that were scored."""
    for metric, value, unit in (
        ("held_bytes", mine.of_whole_batches(mine.held), "bytes"),
        ("scored_kept_tokens", mine.mean_kept, "tokens"),
        ("scored_bytes", mine.of_whole_batches(mine.scored_held), "bytes"),
    ):
        yield replace(base, metric=metric, value=value, unit=unit)
    if mine.full_16bit and sum(mine.scored_held) > 0:
        note = "bytes of a full cache in 16 bits over bytes held, slots for coming tokens included; means while scored"
        smaller = sum(mine.full_16bit) / sum(mine.scored_held)
        yield replace(base, metric="x_smaller", value=smaller, unit="x", note=f"{note}; {base.note}")


def _note(method: MethodRun, mine: Scores, context: RunContext, settings: Perplexity, windows: list[int]) -> str:
    prompt = "an empty cache" if settings.protocol == "stream" else str(settings.context)
    begun = {0: "no BOS added", 1: "the first is BOS"}.get(len(context.bos), f"the first {len(context.bos)} are BOS")
    parts = [f"{len(windows)} windows of {prompt} + {settings.tokens} tokens, {begun}"]
    if settings.protocol == "chunked":
        parts.append(f"approximate: blocks of {settings.chunk} tokens, evicted and quantised after each block only")
    if method.method.rule.sinks_in_place > 0 and settings.longest - mine.kept[0] > EXACT_ANGLES:
        parts.append(f"rotary angles in float32 lose precision beyond {EXACT_ANGLES} evicted tokens")
    if _exceeds_positions(context, settings):
        parts.append(f"beyond the model's {context.loaded.max_positions} positions")
    return "; ".join(parts)


def _flags(context: RunContext, settings: Perplexity, windows: int) -> Iterator[str]:
    if windows < ENOUGH_WINDOWS:
        yield "few_windows"
    if _exceeds_positions(context, settings):
        yield "beyond_positions"


def _exceeds_positions(context: RunContext, settings: Perplexity) -> bool:
    limit = context.loaded.max_positions
    return limit is not None and settings.longest > limit


def _stride(offsets: list[int], windows: list[int]) -> int | None:
    """Tokens from one window to the next; None where there is one."""
    return None if len(windows) < 2 else offsets[windows[1]] - offsets[windows[0]]


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
    # An interval over blocks covers these windows only, so it shows nothing about the method.
    if metric == "nll_minus_full" and units.of_windows and interval is not None and interval[1] < 0:
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


def samples_of(
    methods: list[MethodRun], scores: dict[str, Scores], context: RunContext, settings: Perplexity
) -> list[dict[str, object]]:
    """One record a window: which tokens of which text it holds, and each method's means over them."""
    samples = window_records(context, settings)
    for w, sample in enumerate(samples):
        ids = sample.pop("ids", None)
        sample["methods"] = [
            {
                "method": method.row.method,
                "store": method.row.store,
                "knobs": method.knobs,
                **{name: scores[method.label].of_window(name, w) for name in ("nll", *COMPARED)},
            }
            for method in methods
        ]
        if ids is not None:
            sample["ids"] = ids
    return samples


def window_records(context: RunContext, settings: Perplexity) -> list[dict[str, object]]:
    """One record a window: which tokens of which text it holds. offset: first token, counted in the window's own text.
    ids: the tokens, with `save_tokens`."""
    records = []
    stretches = context.stretches or (Stretch(str(context.baseline.row.dataset), 0, len(context.tokens)),)
    for w, offset in enumerate(settings.offsets(context.lengths)):
        stretch = next(each for each in stretches if each.start <= offset < each.stop)
        ids = context.window(offset, settings.longest).tolist()
        record: dict[str, object] = {
            "measure": "perplexity",
            "protocol": settings.protocol_name,
            "window": w,
            "text": stretch.name,
            "offset": offset - stretch.start,
            "context": settings.longest - settings.tokens,
            "tokens": settings.tokens,
            "sha256": token_hash(ids),
        }
        if context.save_tokens:
            record["ids"] = ids
        records.append(record)
    return records
