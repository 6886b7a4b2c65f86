"""`python -m kvbench.plan model=llama3.1-8b context=32768 batch=8 memory=80GiB`: what caches will take, by formula.

From the config alone: no weights are loaded and nothing is measured. Other words are settings of `python -m kvbench`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.checkpoint import ModelSpec, model_spec
from kvbench.config import MethodConfig, method_config, method_configs
from kvbench.errors import EXIT_USER_ERROR, UserError, exit_with
from kvbench.messages import names, one_line
from kvbench.published import PUBLISHED
from kvbench.sweep.plan import node_of

if TYPE_CHECKING:
    from kvbench.cache.size import Planned

USAGE = """python -m kvbench.plan model=llama3.1-8b context=32768 batch=8 memory=80GiB [budget=0.25]

The bytes of each cache by formula, from the model's config alone; with memory=, the largest batch that fits beside the
weights. Without method= or compare='[full,h2o]', every method and store there is. model.path= may be a config.json."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
COUNTS = {"context": 4096, "batch": 1, "tokens": 128}


@dataclass(frozen=True)
class Asked:
    """context: tokens of prompt. tokens: room for new ones. memory: bytes, or None. words: for Hydra."""

    context: int
    batch: int
    tokens: int
    memory: int | None
    words: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or any(word in ("-h", "--help", "help") for word in words):
        print(USAGE)
        return 0
    try:
        asked = read(words)
        with initialize_config_module("kvbench.conf", version_base="1.3"):
            config = compose("config", asked.words)
            methods = chosen_methods(config, asked.words)
        print(table(asked, model_spec(node_of(config, "model")), methods))
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench.plan: {one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def read(words: Sequence[str]) -> Asked:
    """The words of the command line. Raises UserError for a number or size that is none."""
    counts, memory, rest = dict(COUNTS), None, []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"'{word}' is not KEY=VALUE; type context=32768, for example")
        if key in counts:
            if not value.isdigit() or int(value) < 1:
                raise UserError(f"{word} is not a whole number of at least 1; type {key}={COUNTS[key]}, for example")
            counts[key] = int(value)
        elif key == "memory":
            memory = size_of(value)
        else:
            rest.append(word)
    if not any(word.startswith("budget=") for word in rest):
        rest.append("budget=0.25")
    return Asked(counts["context"], counts["batch"], counts["tokens"], memory, rest)


def size_of(text: str) -> int:
    """Bytes of `80GiB`, `24GB`, `1000000`. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)?", text)
    if found is None:
        raise UserError(f"memory={text} is no size; type memory=80GiB or memory=24GB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def chosen_methods(config: DictConfig, words: list[str]) -> list[MethodConfig]:
    """Those that were named, the full cache first; else every keep rule, and every store that takes in all tokens."""
    if any(word.split("=")[0] in ("method", "store", "compare") for word in words):
        return method_configs(config, words)
    without = [word for word in words if not word.startswith("budget=")]
    found = [method_config(compose("config", [*without, "budget=null", "method=full", f"store={store}"]))
             for store in sorted(names("store"), key=lambda name: name != "dense")]  # fmt: skip
    for method in names("method"):
        composed = compose("config", [*words, f"method={method}"])
        if method not in ("full", "recompute") and composed.store.name == "dense":
            found.append(method_config(composed))
    return found


def config_of(spec: ModelSpec) -> Any:
    """The model's transformers config: a config.json, one of PUBLISHED, else what would be loaded."""
    from transformers import AutoConfig

    from kvbench.checkpoint import one_line_errors
    from kvbench.model import load_config

    path = None if spec.path is None else Path(spec.path).expanduser()
    if path is not None and (path.suffix == ".json" or (path / "config.json").is_file()):
        if not path.exists():
            raise UserError(f"model.path={spec.path} does not exist: give a config.json or a model folder")
        with one_line_errors(spec):
            return AutoConfig.from_pretrained(str(path))
    if spec.id in PUBLISHED:
        content = dict(PUBLISHED[spec.id])
        return AutoConfig.for_model(content.pop("model_type"), **content)
    return load_config(spec)


def planned_model(spec: ModelSpec, config: Any) -> Planned:
    """What the cache's formulas need of the model."""
    from kvbench.cache.size import Planned
    from kvbench.model import pick_device, pick_dtype
    from kvbench.shape import (
        choose_mla_layout,
        layer_windows,
        refuse_unsupported,
        shape_of,
        state_numbers,
        with_kv_heads,
    )

    refuse_unsupported(config, spec.name)
    choose_mla_layout(config, spec.mla, spec.name)
    shape = with_kv_heads(shape_of(config), spec.kv_heads, config, spec.name)
    latent = shape.mla not in (None, "expand")
    key_dim = shape.head_dim + (config.qk_rope_head_dim if latent else 0)
    named = "bfloat16" if spec.dtype == "auto" and not spec.random else spec.dtype
    dtype = pick_dtype(named, pick_device(spec.device))
    narrow, wide = state_numbers(config)
    return Planned(shape.kv_heads, key_dim, shape.value_dim, layer_windows(config), dtype, latent,
                   narrow * dtype.itemsize + 4 * wide, shape.state_layers)  # fmt: skip


def weight_bytes(spec: ModelSpec, config: Any, itemsize: int) -> int:
    """Bytes of the weights, tied ones once, counted on a model without any."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvbench.model import causal_class

    causal_class(config, spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return itemsize * sum(int(parameter.numel()) for parameter in model.parameters())


def table(asked: Asked, spec: ModelSpec, methods: list[MethodConfig]) -> str:
    """One line a method: bytes, how many times smaller than the full cache, the largest batch."""
    from kvbench.cache.mla import check_store
    from kvbench.cache.size import cache_bytes, largest_batch
    from kvbench.run import instantiate

    config = config_of(spec)
    model = planned_model(spec, config)
    weights = weight_bytes(spec, config, model.dtype.itemsize)
    total = asked.context + asked.tokens
    full = model.full_bytes(asked.batch, total)
    bounded = sum(window is not None for window in model.windows)
    states = f", {model.state_layers} with a state of fixed size" if model.state_layers else ""
    lines = [
        f"{spec.name}: {len(model.windows) + model.state_layers} layers ({bounded} bounded by a window of their own"
        f"{states}), {model.kv_heads} "
        f"KV heads, {model.numbers} numbers a token and head, "
        f"{str(model.dtype).removeprefix('torch.')}",
        f"batch {asked.batch}, {asked.context:,} tokens of context and room for {asked.tokens:,} more; "
        f"full cache {readable(full)}, weights {readable(weights)}; what a forward needs on the way is not counted",
        "",
        f"{'method':<24}{'budget':>8}{'cache':>14}{'smaller':>9}" + ("" if asked.memory is None else f"{'batch':>9}"),
    ]
    for entry in methods:
        budget = entry.columns.get("budget")
        start = f"{entry.label:<24}{'' if budget is None else budget:>8}"
        try:
            method = instantiate(entry)
            check_store(method.store, (spec.mla or "absorbed") if model.latent else None)
            method.store.check(model.value_dim if model.latent else model.key_dim, model.value_dim)
            size = cache_bytes(method, model, asked.batch, asked.context, asked.tokens)
        except (UserError, HydraException) as error:
            lines.append(f"{start}  refused: {one_line(error)}")
            continue
        except TypeError:
            lines.append(f"{start}  its size is known once it is calibrated")
            continue
        smaller = "" if size == 0 else f"{full / size:.2f}x"
        line = f"{start}{readable(size):>14}{smaller:>9}"
        if asked.memory is not None:
            line += f"{largest_batch(method, model, asked.context, asked.tokens, asked.memory - weights):>9,}"
        lines.append(line)
    return "\n".join(lines)


def readable(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:,.2f} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    exit_with(main)
