"""Another number of KV heads: what GQA saved against MHA, and what fewer heads would save, on the same checkpoint.

More heads by repeating each one's key and value weights: the same logits from a larger cache. Fewer by mean-pooling the
weights of each group (Ainslie et al., 2023, arXiv:2305.13245, section 2.1): lossy without their further training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.errors import UserError
from kvbench.shape import ModelShape

Resize = tuple[int, int, int]
"""KV heads of the checkpoint, KV heads wanted, numbers a head."""


@torch.no_grad()
def convert_kv_heads(model: PreTrainedModel, shape: ModelShape) -> None:
    """Give `model` the KV heads of `shape`, in place; nothing to do where the checkpoint has as many.

    Raises UserError, before anything is changed, for a family whose key and value weights are not found where Llama has
    them (k_proj, v_proj) or Phi 3 (qkv_proj, rows in the order q, k, v), and for weights that are not plain tensors.
    """
    if shape.converted_from is None:
        return
    resize = shape.converted_from, shape.kv_heads, shape.head_dim
    modules = list(attention_modules(model))
    for module in modules:
        check_weights(module, shape, type(model).__name__)
    for module in modules:
        if isinstance(fused := getattr(module, "qkv_proj", None), nn.Linear):
            resize_linear(fused, resize, first=shape.query_heads * shape.head_dim)
        else:
            resize_linear(module.k_proj, resize)
            resize_linear(module.v_proj, resize)
        norm = getattr(module, "k_norm", None)
        if norm is not None and norm.weight.shape[0] == shape.converted_from * shape.head_dim:  # OLMo 2: over all heads
            norm.weight = nn.Parameter(resized(norm.weight, resize), requires_grad=False)
        for name, value in (
            ("num_key_value_groups", shape.query_heads // shape.kv_heads), ("num_key_value_heads", shape.kv_heads)
        ):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, value)
    model.config.num_key_value_heads = shape.kv_heads


def attention_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that attend: those that know how many query heads share a KV head, or project to all at once."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups") or isinstance(getattr(module, "qkv_proj", None), nn.Linear):
            yield module


def check_weights(module: nn.Module, shape: ModelShape, family: str) -> None:
    """Raise UserError unless the weights of one attention module are where `convert_kv_heads` changes them."""
    present = (shape.converted_from or 0) * shape.head_dim
    fused = getattr(module, "qkv_proj", None)
    found = [fused] if fused is not None else [getattr(module, name, None) for name in ("k_proj", "v_proj")]
    rows = shape.query_heads * shape.head_dim + 2 * present if fused is not None else present
    for linear in found:
        if type(linear) is not nn.Linear or linear.weight.shape[0] != rows or linear.weight.is_meta:
            raise UserError(
                f"model.kv_heads={shape.kv_heads} cannot be had from {family}: its key and value weights are not one "
                f"plain matrix of {rows} rows a layer (fused, quantised or offloaded); leave model.kv_heads out"
            )


def resize_linear(linear: nn.Linear, resize: Resize, first: int = 0) -> None:
    """Give the rows after `first` of a projection another number of heads; [first | k | v] where `first` is set."""
    linear.weight = nn.Parameter(resized_rows(linear.weight, resize, first), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(resized_rows(linear.bias, resize, first), requires_grad=False)
    linear.out_features = linear.weight.shape[0]


def resized_rows(rows: Tensor, resize: Resize, first: int) -> Tensor:
    if first == 0:
        return resized(rows, resize)
    return torch.cat([rows[:first], *(resized(part, resize) for part in rows[first:].chunk(2))])


def resized(rows: Tensor, resize: Resize) -> Tensor:
    """rows [Hkv * D, ...] with another number of heads, [H * D, ...]: each repeated, or the mean of each group.

    Query head i reads KV head i // (Hq / Hkv), so what belongs together stands side by side.
    """
    present, wanted, head_dim = resize
    heads: Tensor = rows.unflatten(0, (present, head_dim))
    if wanted > present:
        heads = heads.repeat_interleave(wanted // present, dim=0)
    else:
        heads = heads.unflatten(0, (wanted, -1)).float().mean(1).to(rows.dtype)
    return heads.flatten(0, 1)
