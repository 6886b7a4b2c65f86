"""Perplexity through the compressed cache, and how far its predictions are from the full cache's.

A window is C tokens of context and T scored tokens. The context runs once; each method compresses it, then the scored
tokens are fed one at a time, each attending over what the method has kept. The first is scored from the prompt's last
logits, which no method has touched yet. A single forward pass would never touch a compressed cache.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.cache.build import AnyCache, PrefixCache, build_cache, prefill
from kvbench.cache.forward import forward
from kvbench.cache.record import PrefillRecord
from kvbench.decode import step
from kvbench.measure.bench import Bench, Entry, Finding
from kvbench.results import Row
from kvbench.settings import Perplexity

PROTOCOL = "prefill_decode"


@dataclass
class Scores:
    """Per scored token, one tensor [B, T] a batch of windows. kept, processed: one number a batch."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    engaged: list[Tensor] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)


def perplexity(bench: Bench, settings: Perplexity) -> Iterator[Finding]:
    """One finding: rows nll, ppl, kl, top1, nll_minus_full, engaged, kept_tokens, positions_processed a method."""
    offsets = window_offsets(len(bench.tokens), settings)
    scores = {entry.label: Scores() for entry in bench.entries}
    with bench.progress.phase("perplexity", settings.tokens * len(bench.entries) * len(offsets)) as advance:
        for start in range(0, len(offsets), settings.batch):
            some = offsets[start : start + settings.batch]
            ids = torch.stack([bench.tokens[o : o + settings.longest] for o in some]).to(bench.loaded.device)
            record = prefill(bench.loaded.model, ids[:, : settings.context], [e.method.rule for e in bench.entries])
            full: list[Tensor] = []
            for entry in bench.entries:
                if bench.failed(entry, "perplexity"):
                    continue
                with bench.cell(entry, "perplexity", context=settings.context):
                    score_windows(bench, entry, record, ids[:, settings.context :], full, scores[entry.label])
                advance(settings.tokens * len(some))
    done = [entry for entry in bench.entries if not bench.failed(entry, "perplexity")]
    rows = [row for entry in done for row in _rows(entry, scores, bench, settings)]
    yield Finding(rows, _samples(done, scores, offsets, bench, settings))


def window_offsets(tokens: int, settings: Perplexity) -> list[int]:
    """First token of each window: evenly spread over the text, never overlapping where the text is long enough."""
    if settings.windows == 1:
        return [0]
    stride = (tokens - settings.longest) / (settings.windows - 1)
    return [int(i * stride) for i in range(settings.windows)]


@torch.inference_mode()
def score_windows(bench: Bench, entry: Entry, record: PrefillRecord, targets: Tensor, full: list[Tensor],
                  scores: Scores) -> None:  # fmt: skip
    """Score targets [B, T] after the record's prompts.

    full: log-probabilities [B, V] of the full cache at each step; the baseline fills it, the others compare with it.
    """
    model, length = bench.loaded.model, targets.shape[1]
    cache = build_cache(model, entry.method, record, max_new_tokens=length, kernel=bench.kernel)
    columns: dict[str, list[Tensor]] = {"nll": [], "kl": [], "agrees": [], "engaged": []}
    for t, (logits, engaged) in enumerate(_predictions(bench, cache, targets)):
        log_p = logits.to(torch.float32).log_softmax(-1)
        if entry.is_baseline:
            full.append(log_p)
        target = targets[:, t : t + 1]
        columns["nll"].append(-log_p.double().gather(-1, target).squeeze(-1))
        columns["kl"].append(divergence(full[t], log_p))
        columns["agrees"].append((full[t].argmax(-1) == log_p.argmax(-1)).double())
        columns["engaged"].append(torch.full_like(columns["nll"][-1], float(engaged)))
    for name, steps in columns.items():
        getattr(scores, name).append(torch.stack(steps, dim=1).cpu())
    scores.kept.append(cache.kept_tokens)
    scores.processed.append(cache.positions_processed)


def _predictions(bench: Bench, cache: AnyCache, targets: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Logits [B, V] for each target in turn, and whether they were made after something had been compressed."""
    model = bench.loaded.model
    if isinstance(cache, PrefixCache):
        # One forward over everything scores all targets; timing recompute is the latency measure's business.
        ids = torch.cat([cache.ids, targets[:, :-1]], dim=1)
        cache.positions_processed += ids.shape[1]
        for logits in forward(model, ids, None, targets.shape[1]).unbind(1):
            yield logits, False
        return
    yield cache.last_logits, False
    for t in range(targets.shape[1] - 1):
        engaged = cache.has_compressed
        yield step(model, targets[:, t : t + 1], cache)[:, -1], engaged


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats of log-probabilities [B, V]: float64 [B]."""
    p, q = log_p.double(), log_q.double()
    return (p.exp() * (p - q)).sum(-1)


def _rows(entry: Entry, scores: dict[str, Scores], bench: Bench, settings: Perplexity) -> list[Row]:
    mine, full = scores[entry.label], scores.get(bench.baseline.label)
    nll = torch.cat(mine.nll)
    base = replace(
        entry.row, measure="perplexity", protocol=PROTOCOL, context=settings.context, n=nll.numel(),
        batch=min(settings.batch, settings.windows),
        note=f"{settings.windows} windows of {settings.context} + {settings.tokens} tokens, no BOS added",
    )  # fmt: skip
    mean = float(nll.mean())
    values: dict[str, tuple[float, str]] = {
        "nll": (mean, "nats"),
        "ppl": (math.exp(mean) if mean < 700 else math.inf, ""),
        "kl": (float(torch.cat(mine.kl).mean()), "nats"),
        "top1": (float(torch.cat(mine.agrees).mean()), "share"),
        "engaged": (float(torch.cat(mine.engaged).mean()), "share"),
        "kept_tokens": (sum(mine.kept) / len(mine.kept), "tokens"),
        "positions_processed": (float(sum(mine.processed)), "positions"),
    }
    if full is not None and len(full.nll) == len(mine.nll):
        values["nll_minus_full"] = (mean - float(torch.cat(full.nll).mean()), "nats")
    return [replace(base, metric=metric, value=value, unit=unit) for metric, (value, unit) in values.items()]


def _samples(entries: list[Entry], scores: dict[str, Scores], offsets: list[int], bench: Bench,
             settings: Perplexity) -> list[dict[str, object]]:  # fmt: skip
    samples = []
    for w, offset in enumerate(offsets):
        ids = bench.tokens[offset : offset + settings.longest].tolist()
        sample: dict[str, object] = {
            "measure": "perplexity", "window": w, "offset": offset, "context": settings.context,
            "tokens": settings.tokens, "sha256": token_hash(ids),
            "methods": [
                {"method": entry.row.method, "nll": _mean(scores[entry.label].nll, w), "kl": _mean(scores[entry.label].kl, w),
                 "top1": _mean(scores[entry.label].agrees, w), "store": entry.row.store, "knobs": entry.knobs}
                for entry in entries
            ],
        }  # fmt: skip
        if bench.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples


def _mean(batches: list[Tensor], window: int) -> float:
    return float(torch.cat(batches)[window].mean())


def token_hash(ids: list[int]) -> str:
    """sha256 of token ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
