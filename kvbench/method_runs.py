"""From resolved configs to methods, and to the rows that their numbers start from."""

from __future__ import annotations

import json
from typing import Any

import hydra.utils
import torch
from omegaconf import DictConfig

from kvbench.cache.build import Method, decode_kernel
from kvbench.cache.chunked import check_chunks
from kvbench.config import MethodConfig
from kvbench.measures.context import MethodRun
from kvbench.models.load import LoadedModel, tokenizer_hash
from kvbench.progress import Progress
from kvbench.results import provenance
from kvbench.results.row import Row, with_flags
from kvbench.texts.load import Text


def instantiate(config: MethodConfig) -> Method:
    """The method of a resolved config. Raises UserError for knobs that its rule or store refuses."""
    rule, slots = hydra.utils.instantiate(config.rule), hydra.utils.instantiate(config.slots)
    method = Method(config.name, rule, slots, config.prefill_chunk)
    method.check_combination()
    check_chunks(method)
    return method


def method_runs(
    methods: list[tuple[MethodConfig, Method]],
    loaded: LoadedModel,
    text: Text,
    config: DictConfig,
    progress: Progress,
    bos: tuple[int, ...],
) -> list[MethodRun]:
    """Each method with a label of its own and the columns that all its rows share."""
    base = base_row(loaded, text, config.seed, bos)
    repeats: dict[str, int] = {}
    runs = []
    for method_config, method in methods:
        repeat = repeats[method_config.label] = repeats.get(method_config.label, 0) + 1
        label = method_config.label if repeat == 1 else f"{method_config.label} #{repeat}"
        kernel = kernel_name(method, loaded, config.kernel, label, progress)
        row, knobs = row_of(base, method_config, loaded, kernel, method.rule.sees_future)
        runs.append(MethodRun(method, label, row, knobs))
    return runs


def base_row(loaded: LoadedModel, text: Text, seed: int, bos: tuple[int, ...]) -> Row:
    """What the rows of all methods of a run have in common."""
    row = Row(
        model=loaded.name,
        revision=loaded.revision,
        arch=loaded.arch,
        kv_heads=loaded.kv_heads,
        converted=loaded.converted,
        weights=loaded.weights,
        dataset=text.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=device_name(loaded.device),
        threads=torch.get_num_threads(),
        seed=seed,
        bos="first" if bos else "none",
        tokenizer=tokenizer_hash(loaded.tokenizer),
    )
    return with_flags(row, "unused_weights") if loaded.unused_weights else row


def row_of(
    base: Row, config: MethodConfig, loaded: LoadedModel, kernel: str, sees_future: bool = False
) -> tuple[Row, dict[str, Any]]:
    """The row that a method's numbers start from, and all its knobs."""
    knobs = {key: value for key, value in config.columns.items() if value is not None}
    # The column is the run's seed; a method of the list may have been given one of its own.
    own_seed = {"seed": knobs["seed"]} if knobs.get("seed", base.seed) != base.seed else {}
    layout = {"mla": loaded.mla} if loaded.mla else {}
    others = _json(config.others | own_seed | layout)
    columns = {key: value for key, value in knobs.items() if key != "seed"}
    row = Row(
        **{**vars(base), "method": config.name, "store": config.store, "kernel": kernel, "knobs": others, **columns}
    )
    return (with_flags(row, "sees_future") if sees_future else row), knobs | config.others


def kernel_name(method: Method, loaded: LoadedModel, wanted: str, label: str, progress: Progress) -> str:
    """The kernel that a method's caches decode on; why it is not the one that was chosen is printed."""
    kernel = decode_kernel(method, loaded.model, loaded.dtype, wanted)
    if reason := getattr(kernel, "reason", ""):
        progress.say(f"note: {label} decodes on the {kernel.name} kernel: {reason}")
    return kernel.name if method.kind == "slots" else "sdpa"


def device_name(device: torch.device) -> str:
    """The processor's or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu_name()


def _json(others: dict[str, Any]) -> str | None:
    given = {key: value for key, value in others.items() if value is not None}
    return json.dumps(given, sort_keys=True) if given else None
