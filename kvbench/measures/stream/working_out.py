"""A working-out is fed token by token, the method evicting as it goes; then answers are scored.

An answer is right where every one of its tokens is the likeliest after the right tokens before it. So a method is asked
what its cache still holds, and a wrong answer spoils none of those after it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.caches import AnyCache
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.question_rows import above_full, engagement, finite_flags, mean_over
from kvbench.measures.result import Result
from kvbench.measures.statistics import Units, bounds, mean_interval
from kvbench.measures.stream import Stream
from kvbench.results.row import Row, with_flags
from kvbench.texts.stream_tasks import Written, write
from kvbench.texts.tokens import token_hash


@dataclass(frozen=True)
class Answered:
    """A method's answers to one sample.

    right: of each answer. nll: nats, summed over the answers' tokens. tokens: of all answers. engaged: share of these
    that were predicted after an eviction or a quantisation. kept: tokens held at the end. finite: whether all logits
    of answers were.
    """

    right: list[bool]
    nll: float
    tokens: int
    engaged: float
    kept: float
    finite: bool

    @property
    def score(self) -> float:
        """Share of right answers; nan where logits were not finite."""
        return sum(self.right) / len(self.right) if self.finite else math.nan


Found = dict[str, dict[int, Answered]]
"""By method, then by number of the sample."""


def write_and_ask(context: RunContext, settings: Stream, task: str, length: int) -> Result:
    """Rows answer_rate, answer_rate_minus_full, answer_nll, engaged, kept_tokens of each method."""
    samples: list[Written] = context.prepared.get("stream", {}).get((task, length)) or [
        write(context.loaded.tokenizer, task, length, context.seed, i, context.bos) for i in range(settings.samples)
    ]
    where: dict[str, Any] = {"context": length, "protocol": task}
    found: Found = {method.label: {} for method in context.methods}
    with context.progress.phase(f"stream {task} {length}", len(samples) * len(context.methods)) as advance:
        for first in range(0, len(samples), settings.batch):
            batch = samples[first : first + settings.batch]
            ids = padded(batch, context.loaded.device)
            prompt = batch[0].prompt

            def ask(method: MethodRun, cache: AnyCache, batch: list[Written] = batch, first: int = first) -> None:
                answers = fed(context, cache, padded(batch, context.loaded.device), batch)
                found[method.label] |= {first + i: one for i, one in enumerate(answers)}
                context.save_kept_tokens(method, cache, range(first, first + len(batch)), "stream", **where)
                advance(len(batch))

            each_cache(context, ids[:, :prompt], ask, ids.shape[1] - prompt, 1, "stream", **where)
    done = context.remaining("stream", **where)
    rows = [row for method in done for row in _rows(context, method, settings, where, found)]
    return Result(rows, [_sample(context, done, i, one, where, found) for i, one in enumerate(samples)])


def padded(batch: list[Written], device: torch.device) -> Tensor:
    """The samples as int64 [B, N]; shorter ones repeat their last token, which is fed after their last answer."""
    longest = max(len(one.ids) for one in batch)
    return torch.tensor([one.ids + one.ids[-1:] * (longest - len(one.ids)) for one in batch], device=device)


@torch.inference_mode()
def fed(context: RunContext, cache: AnyCache, ids: Tensor, batch: list[Written]) -> list[Answered]:
    """Feed what follows the prompt, one token at a time, and score the answers of each sample."""
    asked = min(one.answers[0][0] for one in batch)
    logits, hits, losses, engaged = cache.last_logits, [], [], []
    for t in range(batch[0].prompt, ids.shape[1]):
        if t >= asked:
            target = ids[:, t]
            hits.append(logits.argmax(-1) == target)
            losses.append(-logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0])
            engaged.append(cache.has_compressed)
        if t + 1 < ids.shape[1]:
            logits = cache.step(context.loaded.model, ids[:, t : t + 1])[:, -1]
    hit, loss = torch.stack(hits, 1).cpu(), torch.stack(losses, 1).double().cpu()
    found = []
    for row, one in enumerate(batch):
        spans = [slice(start - asked, stop - asked) for start, stop in one.answers]
        own = torch.cat([loss[row, span] for span in spans])
        compressed = [flag for span in spans for flag in engaged[span]]
        found.append(
            Answered(
                [bool(hit[row, span].all()) for span in spans],
                float(own.sum()),
                len(own),
                sum(compressed) / len(compressed),
                cache.kept_tokens,
                bool(own.isfinite().all()),
            )
        )
    return found


def _rows(
    context: RunContext, method: MethodRun, settings: Stream, where: dict[str, Any], found: Found
) -> Iterator[Row]:
    mine, full = found[method.label], found.get(context.baseline.label, {})
    asked = sum(len(one.right) for one in mine.values())
    base = replace(
        method.row,
        measure="stream",
        dataset="synthetic",
        batch=min(settings.batch, len(mine)),
        n=len(mine),
        note=f"synthetic: {asked} answers in {len(mine)} samples, after {where['context']} given tokens",
        **where,
    )
    base = with_flags(base, *finite_flags(mine.values()))
    paired = len(full) == len(mine)
    if paired and not any(one.score for one in full.values()):
        base = with_flags(base, "uninformative")
    scores = [one.score for one in mine.values()]
    yield replace(base, metric="answer_rate", unit="share", **mean_over(scores, context.seed))
    if paired and not method.is_baseline:
        theirs = [full[i].score for i in mine]
        flagged = with_flags(base, *finite_flags(full.values()))
        yield above_full(replace(flagged, metric="answer_rate_minus_full"), scores, theirs, context.seed)
    nll = torch.tensor([one.nll for one in mine.values()], dtype=torch.float64).numpy()
    tokens = torch.tensor([one.tokens for one in mine.values()], dtype=torch.float64).numpy()
    units = Units(nll, tokens, 1, False)
    found_bounds = {} if math.isnan(units.mean) else bounds(mean_interval(units, context.seed))
    yield replace(base, metric="answer_nll", value=units.mean, unit="nats", **found_bounds)
    yield from engagement(base, list(mine.values()))


def _sample(
    context: RunContext, methods: list[MethodRun], i: int, one: Written, where: dict[str, Any], found: Found
) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "measure": "stream",
        "task": where["protocol"],
        "length": where["context"],
        "sample": i,
        "answers": [context.loaded.tokenizer.decode(one.ids[start:stop]) for start, stop in one.answers],
        "sha256": token_hash(one.ids),
        "methods": [
            {
                "method": method.row.method,
                "store": method.row.store,
                "knobs": method.knobs,
                "right": found[method.label][i].right,
                "answer_nll": found[method.label][i].nll / found[method.label][i].tokens,
            }
            for method in methods
        ],
    }
    if context.save_tokens:
        sample["ids"] = one.ids
    return sample
