"""kvpress's side of the comparison, in kvpress's environment: kvpress_side.py FOLDER

Reads the model and the tokens that kvbench_side.py wrote. Writes kvpress.npz: of each method the kept pairs, bool
[windows, L, Hkv, T], and the NLL of the tokens that follow, fed one by one.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from pairs import Pair, chosen
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging


def press_of(pair: Pair, ratio: float) -> Any:
    """The press of an expression of `pairs.py`."""
    names = {name: getattr(kvpress, name) for name in dir(kvpress) if name.endswith("Press")}
    return eval(pair.press, {"__builtins__": {}}, {**names, "ratio": ratio})


def kept_by_keys(held: Tensor, full: Tensor) -> Tensor:
    """Which rows of full [H, T, D] stand in held [H, n, D]: bool [H, T]. Keys of two positions are never equal."""
    kept = torch.zeros(full.shape[:2], dtype=torch.bool)
    for head in range(len(full)):
        nearest = torch.cdist(held[head].double(), full[head].double()).argmin(1)
        if not torch.allclose(full[head][nearest], held[head], atol=1e-5):
            raise RuntimeError("a key that kvpress holds is none of the prompt's")
        kept[head, nearest] = True
    return kept


@torch.inference_mode()
def run(model: Any, press: Any, pair: Pair | None, prompt: Tensor, targets: Tensor) -> tuple[np.ndarray, list[float]]:
    """Kept pairs and NLL of one window."""
    full, cache = DynamicCache(), DynamicCache()
    model(prompt, past_key_values=full)
    if press is None:
        logits = model(prompt, past_key_values=cache).logits[:, -1]
    else:
        with press(model):
            logits = model(prompt, past_key_values=cache).logits[:, -1]
    layers = model.model.layers
    kept = []
    for layer, held, whole in zip(layers, cache.layers, full.layers, strict=True):
        here = kept_by_keys(held.keys[0], whole.keys[0])
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        if pair is not None and pair.masks and masked is not None:
            here[masked[1], masked[2]] = False
        kept.append(here)
    found = []
    for t in range(targets.shape[1]):
        found.append(-float(logits.double().log_softmax(-1)[0, targets[0, t]]))
        if t + 1 < targets.shape[1]:
            position = torch.tensor([[prompt.shape[1] + t]])
            step = model(targets[:, t : t + 1], past_key_values=cache, position_ids=position)
            logits = step.logits[:, -1]
    return torch.stack(kept).numpy(), found


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    settings = json.loads((folder / "settings.json").read_text())
    ids = torch.from_numpy(np.load(folder / "tokens.npz")["ids"])
    ratio = 1 - settings["budget"] / settings["context"]
    found: dict[str, list[Any]] = {}
    for eager in (False, True):
        pairs: list[Pair | None] = [pair for pair in chosen(settings["methods"]) if pair.eager is eager]
        if not eager:
            pairs.insert(0, None)
        if not pairs:
            continue
        attention = "eager" if eager else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation=attention
        ).eval()
        for pair in pairs:
            name = "full" if pair is None else pair.name
            for row in ids:
                prompt, targets = row[None, : settings["context"]], row[None, settings["context"] :]
                press = None if pair is None else press_of(pair, ratio)
                kept, nll = run(model, press, pair, prompt, targets)
                found.setdefault(f"kept {name}", []).append(kept)
                found.setdefault(f"nll {name}", []).append(nll)
            print(f"kvpress: {name}", flush=True)
    np.savez(folder / "kvpress.npz", **{key: np.array(value) for key, value in found.items()})
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
