"""Errors of each method's cache over windows of text: one exact pass for all, then each method's own decode loop.

The exact pass runs the whole window once and gives every layer's keys, values and queries. Each method then decodes
the same tokens through its own cache; after some of them the cache is asked by the exact pass's query of the next
position. Errors of decoded tokens thus include what their own keys and values inherited from the layers below.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.cache.build import prefill
from kvbench.cache.caches import AnyCache, KVCache
from kvbench.cache.contents import contents
from kvbench.cache.future import Future
from kvbench.cache.observe import QueriesAt
from kvbench.cache.record import PrefillRecord
from kvbench.errors import UserError
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.error import Error
from kvbench.measures.error.layer_errors import layer_errors, stacked
from kvbench.measures.error.rows import Errors, error_rows, error_samples
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.perplexity.token_scores import divergence
from kvbench.measures.result import Result


@dataclass
class Baseline:
    """What the full cache's own decode loop gave: log-probabilities [B, V] of each decoded token, and the residual
    stream [B, layers, hidden] after each evaluated one. Empty where the full cache failed."""

    predictions: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)


def measure_errors(context: RunContext, settings: Error) -> Iterator[Result]:
    """One result with the rows and samples of each method."""
    offsets = settings.offsets(context.lengths)
    errors = {method.label: Errors() for method in context.methods}
    with context.progress.phase("error", len(offsets) * len(context.methods)) as advance:
        for start in range(0, len(offsets), settings.batch):
            some = offsets[start : start + settings.batch]
            _batch(context, settings, context.windows(some, settings.longest), errors)
            advance(len(some) * len(context.methods))
    done = context.remaining("error", context=settings.context)
    rows = [row for method in done for row in error_rows(method, errors[method.label], context, settings)]
    yield Result(rows, error_samples(done, errors, context, settings))


def _batch(context: RunContext, settings: Error, ids: Tensor, errors: dict[str, Errors]) -> None:
    model, prompt = context.loaded.model, settings.context
    evaluated = settings.evaluated()
    exact: PrefillRecord | None = None
    observation = QueriesAt(tuple(prompt + t for t in evaluated))
    with context.guarded(context.remaining("error", context=prompt), "error", context=prompt):
        exact = prefill(model, ids, observations=[observation])
    if exact is None:
        return
    full = Baseline()

    def look(method: MethodRun, cache: AnyCache) -> None:
        decoded = _decode(model, cache, ids[:, prompt:], evaluated, exact, observation)
        if method.is_baseline:
            full.predictions, full.residuals = decoded.predictions, decoded.residuals
        kl = [divergence(p, q) for p, q in zip(full.predictions, decoded.predictions, strict=False)]
        residual = [
            (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)
            for mine, theirs in zip(decoded.residuals, full.residuals, strict=False)
        ]
        mine = errors[method.label]
        mine.add(decoded.layers, residual, kl)
        mine.engaged.append(decoded.engaged / settings.tokens)
        mine.kept.append(cache.kept_tokens)
        mine.index = [layer.index for layer in cache.compressible] if isinstance(cache, KVCache) else []

    each_cache(
        context,
        ids[:, :prompt],
        look,
        settings.tokens,
        1,
        "error",
        future=Future(ids[:, prompt:], prompt),
        context=prompt,
    )


@dataclass
class Decoded:
    """What one decode loop gave, as in `Baseline`, with the layers' errors at each evaluated token."""

    predictions: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    layers: list[dict[str, Tensor]] = field(default_factory=list)
    engaged: int = 0


@torch.inference_mode()
def _decode(
    model: PreTrainedModel,
    cache: AnyCache,
    targets: Tensor,
    evaluated: list[int],
    exact: PrefillRecord,
    observation: QueriesAt,
) -> Decoded:
    """Feed targets [B, n] one by one; after those in `evaluated` look into the cache."""
    found = Decoded()
    with residual_stream(model) as residual:
        for t, (logits, engaged) in enumerate(cache.predictions(model, targets, 1)):
            found.predictions.append(logits.to(torch.float32).log_softmax(-1))
            found.engaged += engaged
            if t in evaluated:  # the tokens before t are in the cache; the query of t comes next
                found.residuals.append(torch.stack([residual[i] for i in sorted(residual)], dim=1).float())
                if isinstance(cache, KVCache):
                    found.layers.append(_look(cache, exact, observation, evaluated.index(t)))
    return found


def _look(cache: KVCache, exact: PrefillRecord, observation: QueriesAt, i: int) -> dict[str, Tensor]:
    """Errors of every layer that the method applies to, for the exact query of the i-th evaluated token."""
    records = {layer.index: layer.at_home() for layer in exact.layers}

    def each() -> Iterator[dict[str, Tensor]]:
        for layer in cache.compressible:
            record = records[layer.index]
            query = record.observed[observation][:, :, i : i + 1]
            seen = observation.positions[i]
            held = contents(layer, query, record.scoring)
            yield layer_errors(held, query, record.key[:, :, :seen], record.value[:, :, :seen], record.scoring)

    return stacked(each())


@contextmanager
def residual_stream(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """Within the block: the last token's hidden state after each decoder layer, [B, hidden], by the layer's index."""
    found: dict[int, Tensor] = {}
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"measure error finds no list of layers in {type(model).__name__}; leave error out")

    def noting(index: int) -> Any:
        def note(module: nn.Module, given: object, output: Any) -> None:
            found[index] = (output if isinstance(output, Tensor) else output[0])[:, -1]

        return note

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.callback(layer.register_forward_hook(noting(index)).remove)
        yield found
