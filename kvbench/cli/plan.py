"""`python -m kvbench.plan model=llama3.1-8b context=32768 batch=8 memory=80GiB`: bytes of each cache by formula.

The model's config is enough: no weights are loaded and nothing is measured. Other words are settings of
`python -m kvbench`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.words import check_override
from kvbench.config import ConfigSources, MethodConfig, method_config, method_configs, take_sources
from kvbench.config.error_lines import check_root, one_line
from kvbench.config.sources import BUILT_IN
from kvbench.errors import EXIT_USER_ERROR, UserError
from kvbench.models.checkpoint import ModelSpec, model_spec
from kvbench.models.known_configs import PUBLISHED
from kvbench.sweep.plan import node_of

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.cache.size import Planned
    from kvbench.models.shape import ModelShape

USAGE = """python -m kvbench.plan model=llama3.1-8b context=32768 batch=8 memory=80GiB [budget=0.25]

The bytes of each cache by formula, from the model's config alone; with memory=, the largest batch that fits beside the
weights. Without method= or compare='[full,h2o]', every method and store. model.path= may be a config.json.
--config-dir DIR adds methods, stores and models of your own."""
UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
LEAST_MEMORY = 10**6
"""Smallest memory= that is accepted: fewer bytes are a size whose unit was forgotten."""
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
    sources = BUILT_IN
    try:
        sources, rest = take_sources(words)
        asked = read(rest, sources)
        config = sources.composed(asked.words)
        check_root(config, sources)
        methods = chosen_methods(config, asked.words, sources)
        print(table(asked, model_spec(node_of(config, "model")), methods))
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench.plan: {one_line(error, sources)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def read(words: Sequence[str], sources: ConfigSources) -> Asked:
    """The words of the command line. Raises UserError for a value that is no whole number or no size."""
    counts, memory, rest = dict(COUNTS), None, []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"'{word}' is not KEY=VALUE; type context=32768, for example")
        check_override(word, sources)
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
    """Bytes of `80GiB`, `24GB`, `1000000`. Raises UserError for anything else, and for less than a megabyte."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)?", text)
    size = 0 if found is None else int(float(found[1]) * UNITS[found[2] or ""])
    if size < LEAST_MEMORY:
        raise UserError(f"memory={text} is not a memory size; type memory=80GiB or memory=24GB")
    return size


def chosen_methods(config: DictConfig, words: list[str], sources: ConfigSources) -> list[MethodConfig]:
    """The methods that the words name, the full cache first; else every keep rule, and every store of all tokens."""
    if any(word.split("=")[0] in ("method", "store", "compare") for word in words):
        return method_configs(config, [*sources.words, *words])
    without = [word for word in words if not word.startswith("budget=")]
    found = [
        method_config(sources.composed([*without, "budget=null", "method=full", f"store={store}"]), sources)
        for store in sorted(sources.files("store"), key=lambda name: name != "dense")
    ]
    for method in sources.files("method"):
        composed = sources.composed([*words, f"method={method}"])
        if method not in ("full", "recompute") and composed.store.name == "dense":
            found.append(method_config(composed, sources))
    return found


def config_of(spec: ModelSpec) -> Any:
    """The model's transformers config: a config.json, one of PUBLISHED, else what would be loaded."""
    from transformers import AutoConfig

    from kvbench.models.checkpoint import one_line_errors
    from kvbench.models.load import load_config

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


def planned_shape(spec: ModelSpec, config: Any) -> ModelShape:
    """The model's shape. The KV heads and the layout that were asked for are written to the config."""
    from kvbench.models.load import causal_class, has_own_code
    from kvbench.models.shape import (
        choose_mla_layout,
        refuse_unsupported,
        refuse_without_attention_interface,
        shape_of,
        with_kv_heads,
    )

    refuse_unsupported(config, spec.name)
    if not has_own_code(spec, config):
        refuse_without_attention_interface(causal_class(config, spec), spec.name)
    choose_mla_layout(config, spec.mla, spec.name)
    shape = with_kv_heads(shape_of(config), spec.kv_heads, config, spec.name)
    if shape.converted:
        config.num_key_value_heads = shape.kv_heads
    return shape


def planned_model(spec: ModelSpec, config: Any, shape: ModelShape) -> Planned:
    """The model as the formulas of cache bytes need it."""
    from kvbench.cache.size import planned_of
    from kvbench.models.load import pick_device, pick_dtype

    dtype = pick_dtype("bfloat16" if spec.dtype == "auto" else spec.dtype, pick_device(spec.device))
    return planned_of(shape, config, dtype)


def weight_bytes(config: Any, itemsize: int) -> int:
    """Bytes of the weights, tied ones counted once, from a model on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return itemsize * sum(int(parameter.numel()) for parameter in model.parameters())


def table(asked: Asked, spec: ModelSpec, methods: list[MethodConfig]) -> str:
    """One line a method: bytes, how many times smaller than the full cache, the largest batch."""
    from kvbench.cache.size import cache_bytes, largest_batch
    from kvbench.method_runs import instantiate

    config = config_of(spec)
    shape = planned_shape(spec, config)
    model = planned_model(spec, config, shape)
    weights = weight_bytes(config, model.dtype.itemsize)
    full = model.full_bytes(asked.batch, asked.context + asked.tokens)
    lines = [
        *model_lines(asked, spec, shape, model),
        f"batch {asked.batch}, {asked.context:,} tokens of context and room for {asked.tokens:,} more; "
        f"full cache {readable(full)}, weights {readable(weights)}; the activations of a forward are not counted",
        *plan_warnings(asked, shape, weights),
        "",
        f"{'method':<24}{'budget':>8}{'cache':>14}{'smaller':>9}" + ("" if asked.memory is None else f"{'batch':>9}"),
    ]
    for entry in methods:
        budget = entry.columns.get("budget")
        start = f"{entry.label:<24}{'' if budget is None else budget:>8}"
        try:
            method = instantiate(entry)
            method.check_combination(shape.mla)
            check_observed(method, config)
            method.store.check(model.value_dim if model.latent else model.key_dim, model.value_dim)
            size = cache_bytes(method, model, asked.batch, asked.context, asked.tokens)
        except (UserError, HydraException) as error:
            if len(methods) <= 2 and not entry.is_baseline:  # the one method that was named
                raise
            lines.append(f"{start}  refused: {one_line(error)}")
            continue
        except TypeError:
            lines.append(f"{start}  its size depends on calibration")
            continue
        smaller = "" if size == 0 else f"{full / size:.2f}x"
        line = f"{start}{readable(size):>14}{smaller:>9}"
        if asked.memory is not None:
            line += f"{largest_batch(method, model, asked.context, asked.tokens, asked.memory - weights):>9,}"
        lines.append(line)
    return "\n".join(lines)


def model_lines(asked: Asked, spec: ModelSpec, shape: ModelShape, model: Planned) -> list[str]:
    """The first lines of the table: the model, its layers and its data type."""
    bounded = sum(window is not None for window in model.windows)
    states = f", {model.state_layers} with a state of fixed size" if model.state_layers else ""
    dtype = str(model.dtype).removeprefix("torch.")
    auto = " as on a GPU (a CPU runs in float32: model.dtype=float32)" if spec.dtype == "auto" else ""
    layers = f"{shape.n_layers} layers ({bounded} with a sliding window{states})"
    heads = f"{model.kv_heads} KV head{'s' * (model.kv_heads != 1)}, {model.numbers} numbers a token and head"
    return [f"{spec.name}: {shape.arch}, {layers}, {heads}, {dtype}{auto}"]


def plan_warnings(asked: Asked, shape: ModelShape, weights: int) -> list[str]:
    """Warnings: more positions than the model has, weights that do not fit."""
    found = []
    longest = asked.context + asked.tokens
    if shape.max_positions is not None and longest > shape.max_positions:
        found.append(
            f"the model has {shape.max_positions:,} positions and this plan needs {longest:,}: a run will be refused"
        )
    if asked.memory is not None and weights > asked.memory:
        found.append(f"the weights alone do not fit into {readable(asked.memory)}")
    return found


def check_observed(method: Method, config: Any) -> None:
    """Raise UserError where a run would, once it has the model: of rotations that cannot be taken back, as far as the
    config tells, and of capped scores."""
    from kvbench.cache.observe import SOFTCAPPED
    from kvbench.cache.rotary import BEFORE, BEFORE_KEYS, IN_CACHE, UNMOVABLE
    from kvbench.models.shape import mla_layout

    before = any(observation.before_rotation for observation in method.rule.observations())
    turned = (method.rule.sinks_in_place > 0, IN_CACHE), (before, BEFORE), (method.store.calibrates, BEFORE_KEYS)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    for _, instead in filter(lambda pair: pair[0], turned):
        if mla_layout(config) is not None:
            raise UserError(f"latent attention rotates a part of each query, and one key for all heads: {instead}")
        if kind in UNMOVABLE:
            raise UserError(f"{config.model_type} has {kind} rotary frequencies: {instead}")
    if before and getattr(config, "attn_logit_softcapping", None):
        raise UserError(SOFTCAPPED)


def readable(size: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:,.2f} {unit}"
    return f"{size} B"
