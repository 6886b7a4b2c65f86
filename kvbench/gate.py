"""The gate: before anything is measured, a model proves that the full cache gives its own forward's predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import step
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.models.frequencies import FrequencyChange, frequency_change, rope_parameters
from kvbench.models.load import LoadedModel
from kvbench.models.probe import Attended, probe, takes_positions
from kvbench.models.reach import Reach
from kvbench.models.shape import STATES, layer_kinds, layer_reaches

PROMPT, STEPS = 64, 32
"""Tokens of the prompt, and single tokens fed after it."""

SHORT_WINDOW = 24
"""Windows and chunks are shortened to this many tokens, so that the prompt and the steps cross them."""

LIMITS = {torch.float64: 1e-7, torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of two logits, as a share of the largest logit, that rounding explains."""

ROUNDING, MOST_ROUNDING = 16, 1e-2
"""A model that amplifies rounding may differ by `ROUNDING` times what its own forwards of a text and of the text's
beginning differ by, and by `MOST_ROUNDING` at most."""

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
"""Types in which rounding may send a token to another expert: the median over tokens is held against the limit."""

EVALUATED = 64
"""Key positions around each boundary at which a mask function is evaluated."""


@dataclass(frozen=True)
class GateResult:
    """difference: the largest difference of two logits, as a share of the largest logit. steps: tokens decoded one by
    one. line: both in words, for the terminal. change: the length beyond which the model's rotary frequencies change,
    None where they do not; texts that cross it after their prompt are refused."""

    difference: float
    steps: int
    line: str
    change: FrequencyChange | None = None


@dataclass(frozen=True)
class Everything(KeepRule):
    """Keeps every token."""

    needs_budget: ClassVar[bool] = False


def gate(loaded: LoadedModel, kernel: str = "auto") -> GateResult:
    """Compare the full cache with the model's own forward on a prompt and the steps after it.

    Sliding windows and chunks are crossed at a shortened length; at the lengths that the config names, the model's own
    mask functions and rotary embedding are evaluated. The model is as it was afterwards.

    Raises UserError, naming the family, where predictions, masks or rotary embeddings are not what the cache assumes.
    """
    config = loaded.model.config.get_text_config()
    check_masks(loaded, config)
    change = check_frequencies(loaded, config)
    prompt, steps = lengths(loaded, change)
    difference, judged = compare(loaded, config, prompt, steps, kernel)
    limit = LIMITS.get(loaded.dtype, LIMITS[torch.bfloat16])
    if not judged <= limit and loaded.dtype not in SIXTEEN_BIT:
        limit = max(limit, min(MOST_ROUNDING, ROUNDING * own_rounding(loaded, config, prompt, steps)))
    if not judged <= limit:
        raise UserError(
            f"{named(loaded)}: the full cache differs from the model's own forward by {difference:.0e} of the largest "
            f"logit over {steps} steps (at most {limit:.0e} in {str(loaded.dtype).removeprefix('torch.')}), so no "
            "number of this model can be trusted; choose another model"
        )
    line = f"full cache equals the model's forward: max difference {difference:.0e} over {steps} steps"
    return GateResult(difference, steps, line, change)


def named(loaded: LoadedModel) -> str:
    """The model and its family, as the error lines name them."""
    return f"{loaded.name} ({type(loaded.model).__name__})"


# ---------------------------------------------------------------- predictions


@torch.inference_mode()
def compare(loaded: LoadedModel, config: Any, prompt: int, steps: int, kernel: str) -> tuple[float, float]:
    """The largest difference of two logits, as a share of the largest; and the one that is held against the limit."""
    model, ids = loaded.model, text(loaded, prompt + steps)
    with short_windows(config):
        own = model(input_ids=ids, use_cache=False, logits_to_keep=steps + 1).logits
        try:
            cache = build_cache(
                model, Method("full", Everything(), DenseStore()), ids[:, :prompt], steps, kernel=kernel
            )
            logits = [cache.last_logits[:, None]]
            logits += [step(model, ids[:, t : t + 1], cache) for t in range(prompt, prompt + steps)]
        except (torch.OutOfMemoryError, UserError):
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{named(loaded)} cannot run on kvbench's cache: {reason}; choose another model") from error
    return distances(torch.cat(logits, dim=1), own, loaded.dtype)


def text(loaded: LoadedModel, tokens: int) -> Tensor:
    """Random ids of the model's vocabulary, int64 [1, tokens]; the same at every call."""
    ids = torch.randint(loaded.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids.to(loaded.model.device)


@torch.inference_mode()
def own_rounding(loaded: LoadedModel, config: Any, prompt: int, steps: int) -> float:
    """The largest difference, as a share of the largest logit, between the model's own forwards of the whole text and
    of its first `prompt + 1` tokens: no cache is in it, and a causal model differs by rounding alone."""
    ids = text(loaded, prompt + steps)
    with short_windows(config):
        whole = loaded.model(input_ids=ids, use_cache=False).logits[:, : prompt + 1]
        beginning = loaded.model(input_ids=ids[:, : prompt + 1], use_cache=False).logits
    return distances(beginning, whole, loaded.dtype)[0]


def distances(ours: Tensor, own: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Of logits [1, n, V]: the largest difference over all tokens; and the median over tokens in 16 bits, else the
    same. Infinite where a value is not finite."""
    if not bool(ours.isfinite().all() and own.isfinite().all()):
        return float("inf"), float("inf")
    each = (ours.double() - own.double()).abs().amax(-1).flatten() / own.double().abs().max().clamp(min=1e-30)
    largest = float(each.max())
    return largest, float(each.median()) if dtype in SIXTEEN_BIT else largest


def lengths(loaded: LoadedModel, change: FrequencyChange | None) -> tuple[int, int]:
    """Tokens of prompt and steps: within the model's positions, and on one side of the length at which rotary
    frequencies change."""
    room = loaded.max_positions or PROMPT + STEPS
    prompt, steps = PROMPT, STEPS
    if room < prompt + steps:
        prompt = max(1, room // 2)
        steps = max(1, room - prompt)
    if change is not None and change.lies_between(prompt, steps):
        prompt, steps = max(1, change.tokens // 2), max(1, change.tokens - change.tokens // 2)
    return prompt, steps


@contextmanager
def short_windows(config: Any) -> Iterator[None]:
    """Within the block the config's windows and chunks are at most SHORT_WINDOW tokens: the mask functions read the
    config at every forward."""
    before = {key: getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")}
    bounds = any(reach is not None for reach in layer_reaches(config))
    try:
        for key, size in before.items():
            if bounds and isinstance(size, int):
                setattr(config, key, min(size, SHORT_WINDOW))
        yield
    finally:
        for key, size in before.items():
            if bounds and isinstance(size, int):
                setattr(config, key, size)


# ---------------------------------------------------------------- masks


def check_masks(loaded: LoadedModel, config: Any) -> None:
    """Hold the mask function of every layer against what the config was read to say (`layer_reaches`).

    Evaluated before, at and beyond every boundary that the config names. Raises UserError where they differ.
    """
    layers = [i for i, kind in enumerate(layer_kinds(config)) if kind not in STATES]
    expected = dict(zip(layers, layer_reaches(config), strict=True))
    for call in probe(loaded.model, [0]):
        if call.mask is None:
            continue
        reach = expected.get(call.layer)
        for query in queries(config, loaded.max_positions):
            keys = keys_near(query, config, loaded.model.device)
            if not torch.equal(call.mask.sees(query, keys), sees(reach, query, keys)):
                raise UserError(
                    f"{named(loaded)}: layer {call.layer} masks its attention at position {query} in another way than "
                    f"{described(reach)}, which kvbench reads from the config; choose another model"
                )


def sees(reach: Reach | None, query: int, keys: Tensor) -> Tensor:
    """Which key positions [n] a query sees under a reach: bool [n]."""
    causal = keys <= query
    return causal if reach is None else causal & (keys >= reach.first_seen(query))


def described(reach: Reach | None) -> str:
    if reach is None:
        return "full causal attention"
    return f"{'a chunk' if reach.chunked else 'a sliding window'} of {reach.window} tokens"


def boundaries(config: Any) -> list[int]:
    """Every length that the config names as one beyond which something may differ, ascending."""
    named = [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
    named += [getattr(config, "original_max_position_embeddings", None)]
    named += [rope.get("original_max_position_embeddings") for rope in rope_parameters(config)]
    change = frequency_change(config)
    named += [None if change is None else change.tokens]
    return sorted({int(size) for size in named if isinstance(size, int | float) and size > 0})


def queries(config: Any, positions: int | None) -> list[int]:
    """Positions before, at and beyond every boundary, within the model's positions."""
    near = [0, 1, PROMPT] + [n * size + d for size in boundaries(config) for n in (1, 2) for d in (-1, 0, 1)]
    return sorted({query for query in near if 0 <= query < (positions or query + 1)})


def keys_near(query: int, config: Any, device: torch.device) -> Tensor:
    """Key positions where what a query sees may begin or end: int64 [n], ascending."""
    edges = [0, query] + [query - size for size in boundaries(config)]
    edges += [query // size * size for size in boundaries(config)]
    half = EVALUATED // 2
    near = {key for edge in edges for key in range(edge - half, edge + half)}
    return torch.tensor(sorted(key for key in near if 0 <= key <= query + 1), device=device)


# ---------------------------------------------------------------- rotary frequencies


def check_frequencies(loaded: LoadedModel, config: Any) -> FrequencyChange | None:
    """Where the model's rotary frequencies change with the length of the text, None where they do not.

    The key of a position is computed alone and beside later positions across every boundary. Raises UserError where
    the two differ and the config names no such change.
    """
    change = frequency_change(config)
    if not takes_positions(loaded.model):
        return change
    for size in boundaries(config):
        later = [size + 1, size + 7]
        if loaded.max_positions is not None and later[-1] >= loaded.max_positions and has_learned_positions(config):
            continue
        early = max(0, size - 3)
        alone = probe(loaded.model, [early])
        beside = probe(loaded.model, [early, *later])
        probe(loaded.model, [0])  # dynamic frequencies go back to the first ones
        if change is None and not all(same_key(a, b) for a, b in zip(alone, beside, strict=True)):
            raise UserError(
                f"{named(loaded)} rotates the key of position {early} differently once the text is longer than {size} "
                "tokens, and its config names no such change; choose another model"
            )
    return change


def has_learned_positions(config: Any) -> bool:
    """Whether positions beyond the last one cannot be asked for."""
    return not any(rope.get("rope_type") for rope in rope_parameters(config))


def same_key(alone: Attended, beside: Attended) -> bool:
    """Whether the first key of two calls agrees but for rounding."""
    first, second = alone.key[:, :, :1].double(), beside.key[:, :, :1].double()
    rounding = 64 * torch.finfo(alone.key.dtype).eps * first.abs().max()
    return bool((first - second).abs().max() <= rounding)
