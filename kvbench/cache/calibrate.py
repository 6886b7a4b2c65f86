"""Calibration: bases of keys and values that some stores need before they can hold a token, and retrieval heads.

The text is a fixed slice of the essays, 8 rows of 512 tokens, between the windows that perplexity scores; a run whose
windows would score calibration tokens of a store is refused. A model with random weights sees random tokens. What is
found is saved in the cache folder, under a hash of the weights and of the tokens.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.basis import Basis, eigenbasis, load_bases, save_bases, second_moment
from kvbench.cache.method import Method
from kvbench.cache.prefill import prefill
from kvbench.cache.retrieval import load_retrieval, passkey_prompts, retrieval_by_head, save_retrieval
from kvbench.cache.rotary import KeyRotation, key_rotations
from kvbench.errors import UserError
from kvbench.offline import cache_folder
from kvbench.texts.load import load_text
from kvbench.texts.tokens import tokenize

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

ROWS, ROW = 8, 512
"""Prompts that are run, and tokens of each. Many prompts, since the first token of a prompt is unlike the others."""

START = 0.618
"""Where in the essays the rows begin, as a share. Windows begin at even fractions, and few windows are near this."""


def calibrate(method: Method, loaded: LoadedModel) -> Method:
    """The method with what it needs of the model: a calibrated store, a rule that knows the tokenizer or the heads.

    Raises UserError where the essays are not on this machine, or the model's rotary embedding cannot be taken off keys.
    """
    if (rule := method.rule.for_tokenizer(loaded.tokenizer)) is not method.rule:
        method = replace(method, rule=rule)
    if method.rule.calibrates and loaded.mla is None:
        method = replace(method, rule=method.rule.calibrated(_retrieval(loaded)))
    if not method.store.calibrates:
        return method
    if loaded.mla not in (None, "expand"):
        return method  # `build_cache` refuses the combination
    rotations = key_rotations(loaded.model, loaded.n_layers)
    ids = calibration_ids(loaded)
    path = cache_folder() / "calibration" / f"{_name(loaded, ids)}.safetensors"
    bases = load_bases(path, loaded.n_layers, loaded.device)
    if bases is None:
        bases = bases_of(loaded.model, ids.to(loaded.device), rotations)
        with suppress(OSError):  # without a writable cache folder the next run calibrates again
            save_bases(path, bases)
    return replace(method, store=method.store.calibrated(bases, rotations))


def _retrieval(loaded: LoadedModel) -> dict[int, Tensor]:
    prompts = passkey_prompts(calibration_ids(loaded), loaded.tokenizer, loaded.vocab_size)
    path = cache_folder() / "calibration" / f"{_name(loaded, prompts.ids)}.safetensors"
    found = load_retrieval(path)
    if found is None:
        found = retrieval_by_head(loaded.model, replace(prompts, ids=prompts.ids.to(loaded.device)))
        with suppress(OSError):  # as above
            save_retrieval(path, found)
    return found


def bases_of(model: PreTrainedModel, ids: Tensor, rotations: list[KeyRotation | None]) -> list[Basis | None]:
    """The bases of all layers from prompts ids [B, T]; None for layers with a sliding window or a state.

    Keys are taken before their rotary embedding; `rotations` takes it off, one for each layer (None: it has none).
    """
    found: list[Basis | None] = [None] * len(rotations)
    for layer in prefill(model, ids).layers:
        if layer.scoring.window is not None:
            continue
        rotation, position = rotations[layer.index], torch.arange(ids.shape[1], device=ids.device)
        key = layer.key if rotation is None else rotation.take_off(layer.key, position.expand(layer.key.shape[:3]))
        dtype = torch.promote_types(layer.key.dtype, torch.float32)
        sides = [part.to(dtype) for rows in (key, layer.value) for part in eigenbasis(second_moment(rows))]
        found[layer.index] = Basis(*sides)
    return found


def calibration_ids(loaded: LoadedModel) -> Tensor:
    """int64 [8, 512], or shorter rows for a model of fewer positions."""
    row = min(ROW, loaded.max_positions or ROW)
    if loaded.tokenizer is None:
        return torch.randint(loaded.vocab_size, (ROWS, row), generator=torch.Generator().manual_seed(0))
    tokens = tokenize(load_text({"fetched": "essays"}), loaded.tokenizer)
    first, stop = calibration_slice(len(tokens))
    return tokens[first:stop].view(ROWS, ROW)[:, :row]


def calibration_slice(tokens: int) -> tuple[int, int]:
    """First token of the slice of a text of so many tokens, and the token behind its last."""
    first = int(START * tokens)
    return first, first + ROWS * ROW


def check_calibration(tokens: int, scored: list[tuple[int, int]], setting: str) -> None:
    """Raise UserError where a measure would score calibration tokens.

    tokens: of the essays. scored: of each scored stretch the first token and the one after the last. setting: as it was
    given, for the error.
    """
    first, stop = calibration_slice(tokens)
    if any(begin < stop and first < end for begin, end in scored):
        raise UserError(
            f"{setting} would score some of the tokens {first} to {stop} of the essays, "
            "which lowrank is calibrated on; type another number"
        )


def _name(loaded: LoadedModel, ids: Tensor) -> str:
    facts = f"1 {loaded.name} {loaded.revision} {loaded.kv_heads} {loaded.mla} {loaded.dtype} {ids.tolist()}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
