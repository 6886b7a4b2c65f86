"""Scores of each token: its NLL, and the distance of the prediction from the full cache's."""

from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import AnyCache
from kvbench.cache.size import planned_16bit
from kvbench.measures.context import MethodRun, RunContext

COMPARED = ("kl", "kl_reverse", "top1", "top5")
"""Columns that compare with the full cache's prediction of the same token."""
TOP = 5


@dataclass
class Scores:
    """A method's values, one tensor [B, T] a batch of windows; one number a batch for the rest.

    kept, held, processed: tokens, bytes and positions when the batch was scored. scored_kept, scored_held: means over
    the scored tokens. full_16bit: bytes of a full cache in 16 bits, the mean over the same tokens.
    """

    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    kept: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    scored_kept: list[float] = field(default_factory=list)
    scored_held: list[float] = field(default_factory=list)
    full_16bit: list[float] = field(default_factory=list)

    def of(self, name: str) -> Tensor | None:
        """A column over all windows, [W, T]; None where some batch has none: the full cache failed there."""
        batches = self.columns.get(name, [])
        return torch.cat(batches) if len(batches) == len(self.columns["nll"]) else None

    @property
    def mean_kept(self) -> float | None:
        """Tokens kept per KV head, the mean while scored; None where nothing was scored."""
        return sum(self.scored_kept) / len(self.scored_kept) if self.scored_kept else None

    def of_whole_batches(self, values: list[float]) -> float:
        """The mean over the batches that are as large as the first: the last may be smaller."""
        sizes = [len(batch) for batch in self.columns["nll"]]
        whole = [value for value, size in zip(values, sizes, strict=True) if size == sizes[0]]
        return sum(whole) / len(whole)

    def of_window(self, name: str, window: int) -> float | None:
        """A column's mean over one window; None where it is not known."""
        known = torch.cat(self.columns[name]) if self.columns.get(name) else torch.empty(0)
        return float(known[window].mean()) if window < len(known) else None


class Scorer:
    """Scores a batch of windows token by token through one method's cache, in as many pieces as the caller likes.

    targets: [B, T], what follows the cache's prompt. step: tokens in one forward.
    """

    def __init__(self, context: RunContext, method: MethodRun, cache: AnyCache, targets: Tensor, step: int = 1) -> None:
        self.method, self.cache, self.targets, self.done = method, cache, targets, 0
        self.predictions = cache.predictions(context.loaded.model, targets, step)
        self.steps: dict[str, list[Tensor]] = {}
        self.planned = planned_16bit(context.loaded, context.loaded.model.config.get_text_config())
        self.kept, self.held, self.full_16bit = list[float](), list[float](), list[float]()

    @torch.inference_mode()
    def score(self, count: int, full: list[Tensor]) -> None:
        """Score the next `count` tokens.

        full: log-probabilities [B, V] of the full cache for each of them. The baseline fills it, the others compare
        with it. Where the baseline has failed it is empty, and there is nothing to compare with.
        """
        for t, (logits, engaged) in enumerate(islice(self.predictions, count)):
            log_p = logits.to(torch.float32).log_softmax(-1)
            if self.method.is_baseline:
                full.append(log_p)
            target = self.targets[:, self.done : self.done + 1]
            values = {"nll": -log_p.double().gather(-1, target).squeeze(-1)}
            values["engaged"] = torch.full_like(values["nll"], float(engaged))
            if t < len(full):
                values |= compare(full[t], log_p)
            for name, value in values.items():
                self.steps.setdefault(name, []).append(value.cpu())
            self._note_bytes()
            self.done += 1

    def _note_bytes(self) -> None:
        """Note what the cache holds now, and what a full cache of as many tokens would hold in 16 bits."""
        self.kept.append(self.cache.kept_tokens)
        self.held.append(held_bytes(self.cache.buffers()).held)
        if self.planned is not None:
            self.full_16bit.append(self.planned.full_bytes(len(self.targets), self.cache.seen))

    def close(self, scores: Scores) -> None:
        """Add the scored columns, the kept tokens and the held bytes to `scores`."""
        found = {name: torch.stack(steps, dim=1) for name, steps in self.steps.items() if len(steps) == self.done}
        for name, column in found.items():
            scores.columns.setdefault(name, []).append(column)
        scores.kept.append(self.cache.kept_tokens)
        scores.held.append(held_bytes(self.cache.buffers()).held)
        scores.processed.append(self.cache.positions_processed)
        for means, values in (
            (scores.scored_kept, self.kept),
            (scores.scored_held, self.held),
            (scores.full_16bit, self.full_16bit),
        ):
            if values:
                means.append(sum(values) / len(values))


def compare(log_p: Tensor, log_q: Tensor) -> dict[str, Tensor]:
    """The full cache's log-probabilities [B, V] against a method's: `COMPARED`, each float64 [B].

    kl: KL(full || method) in nats, kl_reverse: KL(method || full). top1: 1 where both expect the same token first.
    top5: share of the full cache's five likeliest tokens that are among the method's five. All are NaN where either
    has NaN among its logits: the largest of NaNs would agree with itself.
    """
    first, others = (x.topk(min(TOP, x.shape[-1]), dim=-1).indices for x in (log_p, log_q))
    undefined = log_p.isnan().any(-1) | log_q.isnan().any(-1)
    found = {
        "kl": divergence(log_p, log_q),
        "kl_reverse": divergence(log_q, log_p),
        "top1": (log_p.argmax(-1) == log_q.argmax(-1)).double(),
        "top5": (first.unsqueeze(-1) == others.unsqueeze(-2)).any(-1).double().mean(-1),
    }
    return {name: value.masked_fill(undefined, torch.nan) for name, value in found.items()}


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats of log-probabilities [B, V]: float64 [B]. What p rules out (-inf) adds nothing."""
    p, q = log_p.double(), log_q.double()
    return torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1)
