"""Perplexity through the compressed cache, and how far its predictions are from the full cache's.

A window is C tokens of context and T scored tokens. The context runs once; each method compresses it, then the scored
tokens are fed one at a time, each attending over what the method has kept. The first is scored from the prompt's last
logits, which no method has touched yet. A single forward pass would never touch a compressed cache.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.account import held_bytes
from kvbench.cache.build import AnyCache, PrefixCache, build_cache, prefill
from kvbench.cache.forward import forward
from kvbench.cache.record import PrefillRecord
from kvbench.cache.rotary import EXACT_ANGLES
from kvbench.decode import step
from kvbench.measure.bench import Bench, Entry, Finding
from kvbench.rows import Row
from kvbench.settings import Perplexity

PROTOCOL = "prefill_decode"


@dataclass
class Scores:
    """Per scored token, one tensor [B, T] a batch of windows. kept, held (bytes), processed: one number a batch."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    engaged: list[Tensor] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)


def perplexity(bench: Bench, settings: Perplexity) -> Iterator[Finding]:
    """One finding: rows nll, ppl, kl, top1, nll_minus_full, held_bytes (of a batch), engaged, kept_tokens a method."""
    offsets = window_offsets(len(bench.tokens), settings)
    scores = {entry.label: Scores() for entry in bench.entries}
    with bench.progress.phase("perplexity", settings.tokens * len(bench.entries) * len(offsets)) as advance:
        for start in range(0, len(offsets), settings.batch):
            entries = bench.alive("perplexity")
            some = offsets[start : start + settings.batch]
            ids = torch.stack([bench.tokens[o : o + settings.longest] for o in some]).to(bench.loaded.device)
            record: PrefillRecord | None = None
            with bench.shared(entries, "perplexity", context=settings.context):
                record = prefill(bench.loaded.model, ids[:, : settings.context], [e.method.rule for e in entries])
            full: list[Tensor] = []
            for entry in entries if record is not None else []:
                with bench.cell(entry, "perplexity", context=settings.context):
                    score_windows(bench, entry, record, ids[:, settings.context :], full, scores[entry.label])
                advance(settings.tokens * len(some))
    done = bench.alive("perplexity")
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
    Where the baseline has failed it is empty, and there is no kl and no agreement.
    """
    model, length = bench.loaded.model, targets.shape[1]
    cache = build_cache(model, entry.method, record, max_new_tokens=length, kernel=bench.kernel)
    columns: dict[str, list[Tensor]] = {"nll": [], "kl": [], "agrees": [], "engaged": []}
    mine: list[Tensor] = []
    for t, (logits, engaged) in enumerate(_predictions(bench, cache, targets)):
        log_p = logits.to(torch.float32).log_softmax(-1)
        if entry.is_baseline:
            mine.append(log_p)
        target = targets[:, t : t + 1]
        columns["nll"].append(-log_p.double().gather(-1, target).squeeze(-1))
        reference = log_p if entry.is_baseline else full[t] if full else None
        if reference is not None:
            columns["kl"].append(divergence(reference, log_p))
            columns["agrees"].append((reference.argmax(-1) == log_p.argmax(-1)).double())
        columns["engaged"].append(torch.full_like(columns["nll"][-1], float(engaged)))
    full.extend(mine)
    for name, steps in columns.items():
        if steps:
            getattr(scores, name).append(torch.stack(steps, dim=1).cpu())
    scores.kept.append(cache.kept_tokens)
    scores.held.append(held_bytes(cache.buffers()).held)
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
    far = entry.method.rule.sinks_in_place > 0 and settings.longest - mine.kept[0] > EXACT_ANGLES
    angles = f"; float32 angles beyond {EXACT_ANGLES} evicted tokens" if far else ""
    base = replace(
        entry.row, measure="perplexity", protocol=PROTOCOL, context=settings.context, n=nll.numel(),
        batch=min(settings.batch, settings.windows),
        note=f"{settings.windows} windows of {settings.context} + {settings.tokens} tokens, no BOS added" + angles,
    )  # fmt: skip
    spread: dict[str, Tensor] = {"nll": nll}
    if len(mine.kl) == len(mine.nll):
        spread["kl"] = torch.cat(mine.kl)
    if full is not None and len(full.nll) == len(mine.nll):
        spread["nll_minus_full"] = nll - torch.cat(full.nll)
    rows = [replace(base, metric="ppl", value=exp(float(nll.mean())), unit="", **_bounds(nll, exp))]
    for metric, values in spread.items():
        rows.append(replace(base, metric=metric, value=float(values.mean()), unit="nats", **_bounds(values)))
    if len(mine.agrees) == len(mine.nll):
        rows.append(replace(base, metric="top1", value=float(torch.cat(mine.agrees).mean()), unit="share"))
    for metric, value, unit in (
        ("engaged", float(torch.cat(mine.engaged).mean()), "share"), ("held_bytes", mine.held[0], "bytes"),
        ("kept_tokens", sum(mine.kept) / len(mine.kept), "tokens"),
        ("positions_processed", sum(mine.processed) / len(mine.processed), "positions"),
    ):  # fmt: skip
        rows.append(replace(base, metric=metric, value=value, unit=unit))
    return rows


def exp(nats: float) -> float:
    """e ** nats; infinite where that is no float any more."""
    return math.inf if nats > 700 else math.exp(nats)


def _bounds(values: Tensor, scale: Callable[[float], float] = float) -> dict[str, Any]:
    """95% interval of the mean of values [W, T], on the scale of the row; tokens are taken as independent draws."""
    if values.numel() < 2:
        return {}
    mean, reach = float(values.mean()), 1.959964 * float(values.std()) / math.sqrt(values.numel())
    return {"low": scale(mean - reach), "high": scale(mean + reach)}


def _samples(entries: list[Entry], scores: dict[str, Scores], offsets: list[int], bench: Bench,
             settings: Perplexity) -> list[dict[str, object]]:  # fmt: skip
    samples = []
    for w, offset in enumerate(offsets):
        ids = bench.tokens[offset : offset + settings.longest].tolist()
        sample: dict[str, object] = {
            "measure": "perplexity", "window": w, "offset": offset, "context": settings.context,
            "tokens": settings.tokens, "sha256": token_hash(ids),
            "methods": [
                {"method": entry.row.method, "store": entry.row.store, "knobs": entry.knobs,
                 "nll": _mean(scores[entry.label].nll, w), "kl": _mean(scores[entry.label].kl, w),
                 "top1": _mean(scores[entry.label].agrees, w)}
                for entry in entries
            ],
        }  # fmt: skip
        if bench.save_tokens:
            sample["ids"] = ids
        samples.append(sample)
    return samples


def _mean(batches: list[Tensor], window: int) -> float | None:
    """None where the full cache failed before this window, so that nothing could be compared with it."""
    known = torch.cat(batches) if batches else torch.empty(0)
    return float(known[window].mean()) if window < len(known) else None


def token_hash(ids: list[int]) -> str:
    """sha256 of token ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
