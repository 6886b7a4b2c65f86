"""What a GGUF file says of its rotary embedding and transformers' loader leaves out: scaling, and frequency factors.

Without them a Llama 3.1 or 3.2 runs on unscaled frequencies: logits are off by several units beyond a few hundred
tokens. llama.cpp divides frequency i by the factor i of the tensor `rope_freqs.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.models.gguf import check_gguf

FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
SCALED = {"linear": ("factor",), "yarn": ("factor", "original_context_length")}
"""Kinds of scaling that are taken over, with the keys that they are given by."""


@dataclass(frozen=True)
class GGUFRotary:
    """scaling: transformers' `rope_parameters` beside the base frequency, None for unscaled. factors: what each
    frequency is divided by, None where the file has no such tensor."""

    scaling: dict[str, Any] | None = None
    factors: list[float] | None = None

    @property
    def is_plain(self) -> bool:
        return self.scaling is None and self.factors is None


def gguf_rotary(path: Path) -> GGUFRotary:
    """Read it from the header. Raises UserError for scaling that cannot be taken over, and for a damaged file."""
    reader = check_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if found := [name for name in LONG_FACTORS if name in tensors]:
        raise UserError(
            f"{path} switches between rotary factors by the length of the text ({found[0]}), which transformers' GGUF "
            "loader drops: give the model as a folder of safetensors"
        )
    factors = [float(factor) for factor in tensors[FACTORS].data.flatten()] if FACTORS in tensors else None
    architecture = str(reader.fields["general.architecture"].contents())
    prefix = f"{architecture}.rope.scaling."
    keys = {key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if prefix in key}
    if f"{architecture}.rope.scale_linear" in reader.fields:  # an older name
        keys |= {"type": "linear", "factor": reader.fields[f"{architecture}.rope.scale_linear"].contents()}
    kind = keys.pop("type", "none")
    keys.pop("finetuned", None)  # says how the weights were made
    if kind == "none" or architecture == "gpt-oss":  # gpt-oss: transformers reads it itself
        return GGUFRotary(None, factors)
    if kind not in SCALED or set(keys) != set(SCALED[kind]):
        raise UserError(
            f"{path} scales its rotary embedding by {prefix}type={kind} with {', '.join(sorted(keys)) or 'no keys'}, "
            f"which transformers' GGUF loader drops and kvbench takes over only for {' and '.join(SCALED)} with "
            "factor and original_context_length: give the model as a folder of safetensors"
        )
    scaling = {"rope_type": kind, "factor": float(keys["factor"])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(keys["original_context_length"])
    return GGUFRotary(scaling, factors)


def scale_config(config: Any, rotary: GGUFRotary) -> None:
    """Write the scaling to a config that was read from the file."""
    if rotary.scaling is not None:
        config.rope_parameters = dict(config.rope_parameters) | rotary.scaling


def divide_frequencies(model: Any, rotary: GGUFRotary, path: Path) -> None:
    """Divide the model's rotary frequencies by the file's factors, in place.

    Raises UserError for a model without one rotary embedding of as many frequencies.
    """
    import torch

    if rotary.factors is None:
        return
    factors = torch.tensor(rotary.factors, dtype=torch.float32)
    embeddings = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    if len(embeddings) != 1 or getattr(embeddings[0], "inv_freq", factors[:0]).shape != factors.shape:
        raise UserError(
            f"{path} holds {len(factors)} rotary factors ({FACTORS}), and {type(model).__name__} has no single rotary "
            "embedding of as many frequencies: give the model as a folder of safetensors"
        )
    for name in ("inv_freq", "original_inv_freq"):
        frequencies = getattr(embeddings[0], name, None)
        if frequencies is not None:
            divided = frequencies / factors.to(frequencies.device)
            if frequencies is embeddings[0]._buffers.get(name):
                embeddings[0].register_buffer(name, divided, persistent=False)
            else:
                setattr(embeddings[0], name, divided)
