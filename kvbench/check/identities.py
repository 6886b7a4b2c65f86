"""The identities. Each compares two ways to one result, and says how far apart they came out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.caches import AnyCache, KVCache
from kvbench.cache.decode import step
from kvbench.cache.forward import forward
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.record import PrefillRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import Store
from kvbench.check.both import BothKernels
from kvbench.check.shadow import held_positions, look, shadow_of
from kvbench.kernels import choose
from kvbench.measures.perplexity.token_scores import divergence

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Largest KL divergence, in nats, between two ways to one result: rounding, in the model's dtype."""

KERNEL_LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference of two kernels on the same cache, as a share of the largest output."""


@dataclass(frozen=True)
class Verdict:
    """One identity, of what it was asked, and how it came out.

    distance, limit: found and allowed, None where nothing is measured. unit: of both. detail: what is wrong, in words.
    """

    identity: str
    subject: str
    passed: bool
    distance: float | None = None
    limit: float | None = None
    unit: str = "KL"
    detail: str = ""


@dataclass(frozen=True)
class Subject:
    """A method under test: `make` builds it anew, with another budget where one is given."""

    label: str
    make: Callable[[int | None], Method]


class Trial:
    """What the identities run on: two different prompts [2, T], and the tokens [2, n] fed after them one by one.

    The prompts are prefilled once alone, once as a batch, and each as a batch with itself, with everything observed
    that `rules` ask for.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Tensor, following: Tensor, kernel: str, rules: Sequence[KeepRule]
    ) -> None:
        self.model, self.prompts, self.following, self.kernel = model, prompts, following, kernel
        self.alone = [prefill(model, prompts[row : row + 1], rules) for row in (0, 1)]
        self.both = prefill(model, prompts, rules)
        self.twins = [prefill(model, prompts[[row, row]], rules) for row in (0, 1)]
        self._uncut: list[tuple[Store, Tensor]] = []

    @property
    def steps(self) -> int:
        return self.following.shape[1]

    @property
    def limit(self) -> float:
        return LIMITS[self.model.dtype]

    @property
    def kernel_name(self) -> str:
        """What decode attention runs on."""
        return choose(self.prompts.device, self.model.dtype, self.kernel).name

    def cache(self, method: Method, record: PrefillRecord) -> AnyCache:
        return build_cache(self.model, method, record, self.steps, kernel=self.kernel)

    def run(self, method: Method, row: int) -> Tensor:
        """Predictions of the method after one of the prompts alone."""
        return decode(self.model, self.cache(method, self.alone[row]), self.following[row : row + 1])

    def uncut(self, method: Method) -> Tensor:
        """Predictions after the first prompt of a store that holds every token: once, whichever methods share it."""
        known = next((found for store, found in self._uncut if store == method.store), None)
        if known is None:
            known = self.run(method, 0)
            self._uncut.append((method.store, known))
        return known


@torch.inference_mode()
def decode(model: PreTrainedModel, cache: AnyCache, ids: Tensor) -> Tensor:
    """Log-probabilities after the prompt and after each of ids [B, n]: [B, n + 1, V]."""
    logits = [cache.last_logits[:, None], *(step(model, ids[:, t : t + 1], cache) for t in range(ids.shape[1]))]
    return log_probabilities(logits)


def log_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """[B, 1, V] a step -> [B, steps, V]."""
    return torch.cat(list(logits), dim=1).float().log_softmax(-1)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest KL over the tokens of two [B, n, V] log-probabilities; infinite where one is no number."""
    worst = float(divergence(theirs.flatten(0, 1), ours.flatten(0, 1)).max())
    return worst if worst == worst else float("inf")


def compare(identity: str, subject: str, ours: Tensor, theirs: Tensor, limit: float) -> Verdict:
    found = distance(ours, theirs)
    return Verdict(identity, subject, found <= limit, found, limit)


# ---------------------------------------------------------------- of the model


@torch.inference_mode()
def model_identities(trial: Trial, full: Method, unquantised: Method | None) -> Iterator[Verdict]:
    """What must hold before any method is looked at.

    full: the full cache. unquantised: a quantising store whose full-precision residual holds everything, None where the
    model's cache has no heads to quantise.
    """
    whole = torch.cat([trial.prompts, trial.following], dim=1)[:1]
    ours = trial.run(full, 0)
    stock = trial.model(input_ids=whole, use_cache=False).logits[:, -trial.steps - 1 :].float().log_softmax(-1)
    yield compare("the cache equals the model's own forward", "full", ours, stock, trial.limit)
    if unquantised is not None:
        same = trial.run(unquantised, 0)
        yield compare("a residual that holds everything equals full", "kivi", same, ours, trial.limit)
    cache = build_cache(trial.model, full, trial.alone[0], trial.steps, max_step=trial.steps, kernel=trial.kernel)
    at_once = log_probabilities([step(trial.model, trial.following[:1], cache, logits_to_keep=0)])
    yield compare("many tokens in one step equal single steps", "full", at_once, ours[:, 1:], trial.limit)


# ---------------------------------------------------------------- of each method


def method_identities(trial: Trial, subject: Subject, full: Method) -> Iterator[Verdict]:
    """What must hold for any keep rule in any store."""
    method = subject.make(None)
    if method.recomputes:
        return
    first, verdicts = followed(trial, subject)
    yield from verdicts
    alone = [first, trial.run(subject.make(None), 1)]
    yield in_turns(trial, subject, alone)
    yield compare("rows of a batch do not affect each other", subject.label, *batches(trial, subject), trial.limit)
    if method.rule.budget is not None:
        everything = subject.make(trial.prompts.shape[1] + trial.steps)
        yield compare(
            "a budget for everything equals full",
            subject.label,
            trial.run(everything, 0),
            trial.uncut(replace(everything, rule=full.rule)),
            trial.limit,
        )


def batches(trial: Trial, subject: Subject) -> tuple[Tensor, Tensor]:
    """Predictions of the two prompts as a batch, and of each where the other row of the batch is the same prompt.

    The shapes are equal, so that matrix products round alike: what differs comes from the other row.
    """

    def predictions(record: PrefillRecord, rows: list[int]) -> Tensor:
        return decode(trial.model, trial.cache(subject.make(None), record), trial.following[rows])

    twins = [predictions(trial.twins[row], [row, row])[row : row + 1] for row in (0, 1)]
    return predictions(trial.both, [0, 1]), torch.cat(twins)


def in_turns(trial: Trial, subject: Subject, alone: Sequence[Tensor]) -> Verdict:
    """Two prompts in turns through one method object: each as if it were alone with an object of its own."""
    method = subject.make(None)
    caches = [trial.cache(method, record) for record in trial.alone]
    logits = [[cache.last_logits[:, None]] for cache in caches]
    for t in range(trial.steps):
        for row, cache in enumerate(caches):
            logits[row].append(step(trial.model, trial.following[row : row + 1, t : t + 1], cache))
    found = max(distance(log_probabilities(ours), theirs) for ours, theirs in zip(logits, alone, strict=True))
    identity = "prompts in turns do not affect each other"
    return Verdict(identity, subject.label, found <= trial.limit, found, trial.limit)


@torch.inference_mode()
def followed(trial: Trial, subject: Subject) -> tuple[Tensor, list[Verdict]]:
    """The predictions after the first prompt, watched step by step.

    Both kernels read the same cache; a shadow attends over the whole history under a mask of what the cache holds;
    and what it holds is held against what the rule promises.
    """
    method = subject.make(None)
    cache, shadow = trial.cache(method, trial.alone[0]), shadow_of(trial.alone[0])
    if not isinstance(cache, KVCache):
        return decode(trial.model, cache, trial.following[:1]), []
    kernels = [BothKernels(layer.kernel) for layer in cache.attention_layers]
    for layer, kernel in zip(cache.attention_layers, kernels, strict=True):
        layer.kernel = kernel
    broken, ours, theirs = promise_broken(cache, method), [cache.last_logits[:, None]], [cache.last_logits[:, None]]
    is_plain = not method.rule.merges and not any(layer.has_quantised for layer in cache.compressible)
    shadowed = method.rule.budget is not None and is_plain
    for t in range(trial.steps):
        token = trial.following[:1, t : t + 1]
        if shadowed:
            look(shadow, cache)
            with kvbench_attention(trial.model):
                theirs.append(forward(trial.model, token, shadow))
        ours.append(step(trial.model, token, cache))
        broken = broken or promise_broken(cache, method)
    found, limit = max(kernel.worst for kernel in kernels), KERNEL_LIMITS[trial.model.dtype]
    verdicts = [
        Verdict(
            f"kernel {cache.kernel_name} equals the reference",
            subject.label,
            found <= limit,
            found,
            limit,
            "difference",
        )
    ]
    predictions = log_probabilities(ours)
    if method.rule.budget is not None:
        verdicts.append(Verdict("what is kept is what the rule promises", subject.label, not broken, detail=broken))
    if shadowed:
        masked = log_probabilities(theirs)
        identity = "evicting equals masking the whole history"
        verdicts.append(compare(identity, subject.label, predictions, masked, trial.limit))
    return predictions, verdicts


def promise_broken(cache: KVCache, method: Method) -> str:
    """What is wrong with the kept positions, in words; empty where nothing is."""
    n_sink = int(getattr(method.rule, "n_sink", 0))
    for layer in cache.compressible:
        counts = held_positions(layer)
        where = f"layer {layer.index} after {layer.seen} tokens"
        if int(counts.max()) > 1:
            return f"{where}: a token is held in two slots"
        if not bool(counts[..., -1].all()):
            return f"{where}: the newest token is gone"
        if not bool(counts[..., :n_sink].all()):
            return f"{where}: one of the first {n_sink} tokens is gone"
    budget, rounding = method.rule.tokens(cache.prompt_tokens), 0.5  # of layer budgets
    growing = [layer.share_growing for layer in cache.compressible if isinstance(layer, RaggedLayer)]
    grown = (cache.seen - cache.prompt_tokens) * sum(growing) / max(1, len(growing))
    buffered = method.rule.evicts_every - 1
    if method.rule.holds_budget and budget is not None and cache.kept_tokens > budget + buffered + grown + rounding:
        return f"{cache.kept_tokens:g} tokens are kept of a budget of {budget} and {buffered} buffered ones"
    return ""
