"""kvbench's side of the comparison with kvpress, in kvbench's own environment.

kvbench_side.py prepare FOLDER [--context N --tokens N --windows N --budget N --methods NAMES]
    writes the model (save_pretrained), the tokens, and each method's kept tokens and NLL
kvbench_side.py check FOLDER
    writes the NLL of kvbench's engine on the tokens that kvpress kept
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pairs import Pair, chosen
from torch import Tensor

from kvbench import __version__
from kvbench.api import load_method, load_model
from kvbench.cache.build import Method, PrefillRecord, build_cache, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule
from kvbench.cache.store import DenseStore
from kvbench.models.load import LoadedModel
from kvbench.offline import fetched_folder

MODEL, TEXT = "smollm2-135m", "essays"
SMALLEST = 132
"""Tokens that lagkv always keeps: 4 sinks and up to two blocks of 64."""


@dataclass(frozen=True)
class Given(KeepRule):
    """Keeps the pairs that are given: bool [L, Hkv, T]."""

    kept: Tensor = field(default_factory=lambda: torch.zeros(0))
    here: Tensor = field(default_factory=lambda: torch.zeros(0))
    decode: Decode = "append"

    decodes: ClassVar[tuple[Decode, ...]] = ("append",)
    ragged_heads = True

    def of_layer(self, record: LayerRecord) -> KeepRule:
        return replace(self, here=self.kept[record.index][None])

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.here.float()

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return scores

    def head_tokens(self, priority: Tensor, budget: int) -> Tensor:
        return self.here.sum(-1)


def method_of(pair: Pair, budget: int, loaded: LoadedModel) -> Method:
    method = load_method(pair.entry, budget=budget, **pair.knobs)
    return replace(method, rule=method.rule.for_tokenizer(loaded.tokenizer))


def nll(loaded: LoadedModel, method: Method, record: PrefillRecord, targets: Tensor) -> tuple[AnyCache, list[float]]:
    """The method's cache of the record, and its NLL of each of the targets [1, n], fed one by one."""
    cache = build_cache(loaded.model, method, record, targets.shape[1])
    found = []
    for t, (logits, _) in enumerate(cache.predictions(loaded.model, targets, 1)):
        found.append(-float(logits.double().log_softmax(-1)[0, targets[0, t]]))
    return cache, found


def windows(tokenizer: Any, context: int, tokens: int, count: int) -> np.ndarray[Any, Any]:
    """int64 [count, context + tokens], spread over the text."""
    files = sorted(fetched_folder("text", TEXT).glob("*.txt"))
    text = "".join(file.read_text() for file in files)
    length, ids = context + tokens, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.array([ids[start : start + length] for start in starts], dtype=np.int64)


def as_mask(cache: AnyCache, context: int) -> np.ndarray[Any, Any]:
    """Which tokens of the prompt the cache keeps: bool [L, Hkv, T]."""
    layers = []
    for _, positions in sorted(cache.kept_positions().items()):
        held = torch.zeros(positions.shape[1], context + 1, dtype=torch.bool)
        held.scatter_(1, positions[0].masked_fill(positions[0] < 0, context).clamp(max=context), True)
        layers.append(held[:, :context])
    return torch.stack(layers).numpy()


def each_window(folder: Path) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Number, prompt [1, T] and targets [1, n] of each window."""
    settings, ids = read_settings(folder), np.load(folder / "tokens.npz")["ids"]
    for w, row in enumerate(torch.from_numpy(ids)):
        yield w, row[None, : settings["context"]], row[None, settings["context"] :]


def read_settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    return found


def prepare(folder: Path, settings: argparse.Namespace) -> None:
    pairs = chosen(settings.methods)
    loaded = load_model(MODEL, device="cpu")
    folder.mkdir(parents=True, exist_ok=True)
    loaded.model.save_pretrained(folder / "model")
    tokenizer = loaded.tokenizer
    template, tokenizer.chat_template = tokenizer.chat_template, None  # the text is not a chat message
    tokenizer.save_pretrained(folder / "model")
    tokenizer.chat_template = template
    np.savez(folder / "tokens.npz", ids=windows(tokenizer, settings.context, settings.tokens, settings.windows))
    fields = ("context", "tokens", "windows", "budget")
    record = {name: getattr(settings, name) for name in fields} | {"methods": settings.methods}
    versions = {"kvbench": __version__, "model": MODEL, "text": TEXT}
    (folder / "settings.json").write_text(json.dumps(record | versions))
    methods = [Method("full", load_method("full").rule, DenseStore())]
    methods += [method_of(pair, settings.budget, loaded) for pair in pairs]
    names = ["full", *(pair.name for pair in pairs)]
    found: dict[str, list[Any]] = {f"{kind} {name}": [] for name in names for kind in ("kept", "nll")}
    for w, prompt, targets in each_window(folder):
        prefilled = prefill(loaded.model, prompt, [method.rule for method in methods])
        for name, method in zip(names, methods, strict=True):
            kept = as_mask(build_cache(loaded.model, method, prefilled, 1), settings.context)
            found[f"kept {name}"].append(kept)
            found[f"nll {name}"].append(nll(loaded, method, prefilled, targets)[1])
        print(f"kvbench: window {w + 1} of {settings.windows}", flush=True)
    np.savez(folder / "kvbench.npz", **{key: np.array(value) for key, value in found.items()})


def check(folder: Path) -> None:
    loaded, peers = load_model(MODEL, device="cpu"), np.load(folder / "kvpress.npz")
    names = [key.removeprefix("kept ") for key in peers if key.startswith("kept ")]
    found: dict[str, list[list[float]]] = {f"nll {name}": [] for name in names}
    for w, prompt, targets in each_window(folder):
        prefilled = prefill(loaded.model, prompt)
        for name in names:
            kept = torch.from_numpy(peers[f"kept {name}"][w])
            method = Method("given", Given(budget=1, kept=kept), DenseStore())
            found[f"nll {name}"].append(nll(loaded, method, prefilled, targets)[1])
    np.savez(folder / "check.npz", **{key: np.array(value) for key, value in found.items()})


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; defaults take a few minutes on 2 cores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=["prepare", "check"])
    parser.add_argument("folder", type=Path)
    for name, default in (("context", 1024), ("tokens", 32), ("windows", 2), ("budget", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--methods", help="names, separated by commas; default: all that both have")
    found = parser.parse_args(words)
    if not SMALLEST <= found.budget < found.context or found.tokens < 1 or found.windows < 1:
        parser.error(
            f"--budget {found.budget} must be {SMALLEST} or more and below --context {found.context}; at least 1 "
            "window and 1 token"
        )
    return found


if __name__ == "__main__":
    given = arguments()
    if given.step == "prepare":
        prepare(given.folder, given)
    else:
        check(given.folder)
