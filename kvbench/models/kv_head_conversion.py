"""Changing a checkpoint's number of KV heads, to compare MHA, GQA and MQA on the same weights.

More heads: each head's key and value weights are repeated, which gives the same logits from a larger cache. Fewer
heads: the weights of each group are mean-pooled (Ainslie et al., 2023, arXiv:2305.13245, section 2.1), which is lossy
without the further training of that paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.errors import UserError
from kvbench.models.shape import ModelShape

Resize = tuple[int, int, int]
"""KV heads of the checkpoint, KV heads wanted, numbers a head."""

PROBE = 8
"""Tokens on which a converted model is compared with the original."""

SAME = 0.02
"""Largest mean difference of logits, as a share of their mean size, that 16-bit rounding explains."""


@torch.no_grad()
def convert_kv_heads(model: PreTrainedModel, shape: ModelShape) -> None:
    """Change `model` to the KV heads of `shape`, in place; nothing changes where the checkpoint has as many.

    Raises UserError, before anything is changed, for a family whose key and value weights are not found where Llama has
    them (k_proj, v_proj) or Phi 3 (qkv_proj, rows in the order q, k, v), and for weights that are not plain tensors;
    and afterwards where repeated heads do not give the same logits, or the family has yet other weights a KV head.
    """
    if shape.converted_from is None:
        return
    resize = shape.converted_from, shape.kv_heads, shape.head_dim
    modules, family = list(attention_modules(model)), type(model).__name__
    if not modules:
        raise UserError(refusal(shape, family, "none of its layers says how many query heads share a KV head"))
    for module in modules:
        check_weights(module, shape, family)
    before = probed(model)
    for module in modules:
        if isinstance(fused := getattr(module, "qkv_proj", None), nn.Linear):
            resize_linear(fused, resize, first=shape.query_heads * shape.head_dim)
        else:
            resize_linear(module.k_proj, resize)
            resize_linear(module.v_proj, resize)
        if norms_all_heads(module, shape):
            module.k_norm.weight = nn.Parameter(resized(module.k_norm.weight, resize), requires_grad=False)
        for name, value in (
            ("num_key_value_groups", shape.query_heads // shape.kv_heads),
            ("num_key_value_heads", shape.kv_heads),
        ):
            if hasattr(module, name):
                setattr(module, name, value)
    model.config.num_key_value_heads = shape.kv_heads
    check_converted(model, before, shape)


def norms_all_heads(module: nn.Module, shape: ModelShape) -> bool:
    """Whether one norm covers the keys of all heads (OLMo 2), not each head (Qwen 3, Gemma 3) or none.

    Told by the sizes of both norms: with one KV head the size of the keys' norm alone is ambiguous.
    """
    norms = [getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    wide = (shape.query_heads * shape.head_dim,), ((shape.converted_from or 0) * shape.head_dim,)
    return tuple(None if weight is None else tuple(weight.shape) for weight in norms) == wide


def probed(model: PreTrainedModel) -> Tensor:
    """Logits of a few tokens, [1, PROBE, V], without a cache."""
    ids = torch.arange(PROBE, device=model.device).unsqueeze(0) % model.config.vocab_size
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def check_converted(model: PreTrainedModel, before: Tensor, shape: ModelShape) -> None:
    """Raise UserError where the converted model does not run, or repeated heads change its logits."""
    family = type(model).__name__
    try:
        after = probed(model)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(refusal(shape, family, "it has other weights of a size that follows the KV heads")) from error
    exact = shape.kv_heads > (shape.converted_from or 0)
    if exact and not float((after - before).abs().mean()) <= SAME * float(before.abs().mean()):
        raise UserError(refusal(shape, family, "repeating its KV heads does not give the same logits"))


def refusal(shape: ModelShape, family: str, why: str) -> str:
    return f"model.kv_heads={shape.kv_heads} cannot be had from {family}: {why}; leave model.kv_heads out"


def attention_modules(model: nn.Module) -> Iterator[Any]:
    """The attention modules: those with `num_key_value_groups` or a fused `qkv_proj`."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups") or isinstance(getattr(module, "qkv_proj", None), nn.Linear):
            yield module


def check_weights(module: nn.Module, shape: ModelShape, family: str) -> None:
    """Raise UserError unless an attention module holds key and value weights as `convert_kv_heads` changes them."""
    present = (shape.converted_from or 0) * shape.head_dim
    fused = getattr(module, "qkv_proj", None)
    found = [fused] if fused is not None else [getattr(module, name, None) for name in ("k_proj", "v_proj")]
    rows = shape.query_heads * shape.head_dim + 2 * present if fused is not None else present
    for linear in found:
        if type(linear) is not nn.Linear or linear.weight.shape[0] != rows or linear.weight.is_meta:
            raise UserError(
                refusal(
                    shape,
                    family,
                    f"its key and value weights are not one plain matrix of {rows} rows "
                    "a layer (fused, quantised or offloaded)",
                )
            )


def resize_linear(linear: nn.Linear, resize: Resize, first: int = 0) -> None:
    """Change the heads of a projection, in place. Rows before `first` stay; [first | k | v] where `first` is set."""
    linear.weight = nn.Parameter(resized_rows(linear.weight, resize, first), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(resized_rows(linear.bias, resize, first), requires_grad=False)
    linear.out_features = linear.weight.shape[0]


def resized_rows(rows: Tensor, resize: Resize, first: int) -> Tensor:
    if first == 0:
        return resized(rows, resize)
    return torch.cat([rows[:first], *(resized(part, resize) for part in rows[first:].chunk(2))])


def resized(rows: Tensor, resize: Resize) -> Tensor:
    """rows [Hkv * D, ...] with another number of heads, [H * D, ...]: each head repeated, or the mean of each group.

    Query head i reads KV head i // (Hq / Hkv), so the heads of a group are neighbours.
    """
    present, wanted, head_dim = resize
    heads: Tensor = rows.unflatten(0, (present, head_dim))
    if wanted > present:
        heads = heads.repeat_interleave(wanted // present, dim=0)
    else:
        heads = heads.unflatten(0, (wanted, -1)).float().mean(1).to(rows.dtype)
    return heads.flatten(0, 1)
