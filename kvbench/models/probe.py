"""What a model's layers hand to attention at chosen positions: one forward in which no layer attends.

Attention gives zeros, so a layer's input depends on the token alone and its query and key on token and position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

IMPLEMENTATION = "kvbench_probe"

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers' kind: whether a query sees a key, of (batch row, head, query position, key position)."""


@dataclass(frozen=True)
class MaskCall:
    """What the model asked its mask interface for. size: of the sliding window or chunk, None without one."""

    function: MaskFunction
    size: int | None

    def sees(self, query: int, keys: Tensor) -> Tensor:
        """Which of the key positions [n] a query at a position sees: bool [n]."""
        row = torch.zeros((), dtype=torch.long, device=keys.device)
        seen = self.function(row, row, row + query, keys)
        return torch.as_tensor(seen, device=keys.device).expand(keys.shape)


@dataclass(frozen=True)
class Attended:
    """One call of the attention function. query [1, Hq, n, D], key [1, Hkv, n, D]; mask: None where the layer was
    given none."""

    layer: int
    query: Tensor
    key: Tensor
    mask: MaskCall | None


_seen: ContextVar[list[Attended]] = ContextVar("calls of the attention function")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **kwargs: object
) -> tuple[Tensor, None]:
    calls = _seen.get()
    mask = attention_mask if isinstance(attention_mask, MaskCall) else None
    calls.append(Attended(int(getattr(module, "layer_idx", None) or len(calls)), query, key, mask))
    zeros = value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return zeros, None


def _mask(*args: object, mask_function: MaskFunction, local_size: int | None = None, **kwargs: object) -> MaskCall:
    return MaskCall(mask_function, local_size)


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model can be told the positions of its tokens."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


@torch.inference_mode()
def probe(model: PreTrainedModel, positions: Sequence[int], token: int = 1) -> list[Attended]:
    """The calls of the attention function when one token stands at each of the positions, in the layers' order."""
    ids = torch.full((1, len(positions)), token, device=model.device)
    told = {"position_ids": torch.tensor([positions], device=model.device)} if takes_positions(model) else {}
    before, token_of = model.config._attn_implementation, _seen.set([])
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        model(input_ids=ids, use_cache=False, **told)
        return _seen.get()
    finally:
        model.set_attn_implementation(before)
        _seen.reset(token_of)
