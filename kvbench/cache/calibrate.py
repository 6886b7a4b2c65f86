"""Calibration: what some stores have to see of a model before they can hold anything.

The text is a fixed slice of the essays, 8 rows of 512 tokens, that lies between the windows which perplexity scores; a
run whose windows would score some of it is refused. A model with random weights sees random tokens. What was found is
kept below the cache folder, by a hash of the weights and of the tokens.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.basis import bases_of, load_bases, save_bases
from kvbench.cache.build import Method
from kvbench.cache.rotary import key_rotations
from kvbench.errors import UserError
from kvbench.offline import cache_folder
from kvbench.texts.load import load_text, tokenize

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

ROWS, ROW = 8, 512
"""Prompts that are run, and their tokens: many beginnings, since a model's first token is unlike all others."""

START = 0.618
"""Where in the essays they begin. Windows lie at even fractions of a text, which this is far from for few of them."""


def calibrate(method: Method, loaded: LoadedModel) -> Method:
    """The method, ready for that model; as it was where its store needs no calibration.

    Raises UserError where the essays are not on this machine, or the model's keys cannot be had before their rotation.
    """
    if not method.store.calibrates:
        return method
    if loaded.mla not in (None, "expand"):
        return method  # the build says what does not go together
    rotations = key_rotations(loaded.model, loaded.n_layers)
    ids = calibration_ids(loaded)
    path = cache_folder() / "calibration" / f"{_name(loaded, ids)}.safetensors"
    bases = load_bases(path, loaded.n_layers, loaded.device)
    if bases is None:
        bases = bases_of(loaded.model, ids.to(loaded.device), rotations)
        with suppress(OSError):  # a cache folder that cannot be written costs the next run its time, and nothing else
            save_bases(path, bases)
    return replace(method, store=method.store.calibrated(bases, rotations))


def calibration_ids(loaded: LoadedModel) -> Tensor:
    """int64 [8, 512], or shorter rows for a model of fewer positions."""
    row = min(ROW, loaded.max_positions or ROW)
    if loaded.tokenizer is None:
        return torch.randint(loaded.vocab_size, (ROWS, row), generator=torch.Generator().manual_seed(0))
    tokens = tokenize(load_text({"fetched": "essays"}), loaded.tokenizer)
    first, stop = calibration_slice(len(tokens))
    return tokens[first:stop].view(ROWS, ROW)[:, :row]


def calibration_slice(tokens: int) -> tuple[int, int]:
    """First token of the slice of a text, and the one behind its last."""
    first = int(START * tokens)
    return first, first + ROWS * ROW


def check_calibration(tokens: int, scored: list[tuple[int, int]], setting: str) -> None:
    """Raise UserError where a measure would score tokens that are calibrated on.

    tokens: of the essays. scored: first token and the one after the last of each scored stretch. setting: as it was
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
