"""Loading a model from a hub id, a folder, a GGUF file, a finished `kvbench.fetch`, or with random weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError
from kvbench.models.checkpoint import ModelSpec, checkpoint, local_path, model_spec, one_line_errors
from kvbench.models.fingerprint import weights_fingerprint
from kvbench.models.gguf import gguf_tokenizer
from kvbench.models.gguf_rotary import GGUFRotary, divide_frequencies, gguf_rotary, scale_config
from kvbench.models.shape import (
    ModelShape,
    choose_mla_layout,
    refuse_unsupported,
    refuse_without_attention_interface,
    shape_of,
    with_kv_heads,
)
from kvbench.models.vocabulary import check_vocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedModel", "ModelSpec", "describe", "end_tokens", "load_model", "load_tokenizer", "model_spec"]


RANDOM_WEIGHTS = "random weights, for speed and memory only"


@dataclass(frozen=True)
class LoadedModel(ModelShape):
    """A model in eval mode without gradients, with its shape, name and revision.

    `tokenizer` is None for random weights.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str
    source: str
    dtype: torch.dtype
    device: torch.device
    note: str | None
    unused_weights: tuple[str, ...] = ()  # names in the checkpoint that the model has no place for

    @property
    def weights(self) -> str:
        """Where the weights come from, as the rows' column says: trained, repeated, pooled or random."""
        if self.source == "random":
            return "random"
        if self.converted_from is None:
            return "trained"
        return "repeated" if self.kv_heads > self.converted_from else "pooled"

    @property
    def remark(self) -> str | None:
        """Facts about this model that readers of its rows need; None where there are none."""
        weights = RANDOM_WEIGHTS if self.source == "random" else None
        unused = (
            f"{len(self.unused_weights)} weights of the checkpoint are not used, as {self.unused_weights[0]}"
            if self.unused_weights
            else None
        )
        return "; ".join(filter(None, (weights, unused, self.note, super().remark))) or None


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Ids that end a text, from the generation config and the tokenizer; empty where neither names one."""
    found = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    named = [*(found if isinstance(found, list | tuple) else [found]), getattr(loaded.tokenizer, "eos_token_id", None)]
    return sorted({int(token) for token in named if token is not None})


def load_tokenizer(spec: ModelSpec) -> Any:
    """The model's tokenizer, or None for random weights. Cheap: call it before the weights are loaded."""
    if spec.random:
        return None
    from transformers import AutoTokenizer

    where, arguments = checkpoint(spec)
    with one_line_errors(spec, "the tokenizer of "):
        if spec.source == "gguf":
            return gguf_tokenizer(local_path(spec))
        return AutoTokenizer.from_pretrained(where, **arguments)


def tokenizer_hash(tokenizer: Any) -> str | None:
    """First 16 hex digits of the sha256 of the tokenizer's state; None without a tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def describe(spec: ModelSpec) -> ModelShape:
    """The model's shape, with the KV heads asked for, from its config alone.

    Raises UserError for every model that `load_model` would refuse.
    """
    config = load_config(spec)
    refuse_unsupported(config, spec.name)
    choose_mla_layout(config, spec.mla, spec.name)
    if not has_own_code(spec, config):
        refuse_without_attention_interface(causal_class(config, spec), spec.name)
    return with_kv_heads(shape_of(config), spec.kv_heads, config, spec.name)


def load_model(spec: ModelSpec) -> LoadedModel:
    """Load tokenizer and weights.

    Raises UserError, one line, for whatever is missing, damaged or unsupported.
    """
    import torch

    from kvbench.models.kv_head_conversion import convert_kv_heads

    device = pick_device(spec.device)
    dtype = pick_dtype(spec.dtype, device)
    tokenizer = load_tokenizer(spec)
    shape = describe(spec)
    check_vocabulary(tokenizer, shape.vocab_size)
    unused: tuple[str, ...] = ()
    if spec.random:
        model = random_model(spec, dtype, device)
    else:
        model, unused = pretrained_model(spec, dtype, device)
    model.eval().requires_grad_(False)
    choose_mla_layout(model.config, spec.mla, spec.name)
    if has_own_code(spec, model.config):  # its class is known only now
        refuse_without_attention_interface(type(model), spec.name)
    convert_kv_heads(model, shape)
    return LoadedModel(
        **{field.name: getattr(shape, field.name) for field in fields(shape)},
        model=model,
        tokenizer=tokenizer,
        name=spec.name,
        revision=revision_of(spec),
        source=spec.source,
        dtype=model.dtype,
        device=torch.device(model.device),
        note=spec.note,
        unused_weights=unused,
    )


def load_config(spec: ModelSpec) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if spec.random:
        settings = {key: value for key, value in spec.random.items() if key not in ("seed", "model_type")}
        kind = spec.random.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise UserError(
                f"model.random.model_type={kind} is not known to transformers: write llama, qwen3, gemma2 ..."
            )
        check_random_sizes(spec.random)
        with one_line_errors(spec, "the random config of "):
            return AutoConfig.for_model(kind, **settings)
    where, arguments = checkpoint(spec)
    with one_line_errors(spec):
        config = AutoConfig.from_pretrained(where, **arguments)
    if spec.source == "gguf":
        scale_config(config, gguf_rotary(local_path(spec)))
    return config


def check_random_sizes(settings: Mapping[str, Any]) -> None:
    """Raise UserError for a size or a seed of `model.random` that is not a whole number in its range."""
    for key, value in settings.items():
        lowest = 0 if key == "seed" else 1
        counts = key == "seed" or key.startswith("num_") or key.endswith(("_size", "_dim", "_layers", "_positions"))
        whole = isinstance(value, int) and not isinstance(value, bool)
        if counts and value is not None and (not whole or not lowest <= value < 2**63):
            raise UserError(f"model.random.{key}={value!r} must be a whole number of at least {lowest}")


def has_own_code(spec: ModelSpec, config: Any) -> bool:
    return spec.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def causal_class(config: Any, spec: ModelSpec) -> type:
    """The class that AutoModelForCausalLM would build. Raises UserError if it has none for this config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{spec.name} ({config.model_type}) is no causal language model: kvbench measures those only")
    found: type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found


def random_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of `spec.random`, its weights drawn from its `seed` (0).

    The caller's random state is kept.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(spec)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(spec.random.get("seed", 0))
        with one_line_errors(spec, "the random weights of "):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)


def pretrained_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[Any, tuple[str, ...]]:
    """The checkpoint's model, and the names of weights in the checkpoint that the model has no place for.

    Raises UserError where weights are missing, damaged or of other shapes than the config says.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    where, arguments = checkpoint(spec)
    logging.disable_progress_bar()  # a bar for seconds; an error after it would not stand alone
    rotary = gguf_rotary(local_path(spec)) if spec.source == "gguf" else GGUFRotary()
    if rotary.scaling is not None:
        arguments["config"] = load_config(spec)
    with one_line_errors(spec):
        model, report = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, output_loading_info=True, **arguments, **spec.load_kwargs
        )
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing:
        raise UserError(f"{spec.name} lacks {len(missing)} weights that its config calls for, as {missing[0]}")
    divide_frequencies(model, rotary, Path(where))
    if "device_map" not in spec.load_kwargs and model.device != device:
        model.to(device)
    return model, tuple(unexpected)


def revision_of(spec: ModelSpec) -> str:
    """The hub commit, else a hash: of the local files (`weights_fingerprint`), or of the random config.

    The commit is where the hub's cache keeps the config that was just loaded:
    .../snapshots/COMMIT/config.json.
    """
    if spec.random:
        return hashlib.sha256(json.dumps(spec.random, sort_keys=True, default=str).encode()).hexdigest()[:12]
    if spec.id is None:
        return weights_fingerprint(local_path(spec))
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(spec.id, "config.json", revision=spec.revision)
    return Path(cached).parent.name if isinstance(cached, str) else spec.revision or "unknown"


def pick_device(wanted: str) -> torch.device:
    import torch

    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UserError(f"model.device={wanted} is not known: write auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device={wanted}: kvbench runs on cpu and cuda; write auto, cpu, cuda or cuda:1")
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"model.device={wanted}: torch sees {torch.cuda.device_count()} CUDA devices; write auto or cpu"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    import torch

    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype
