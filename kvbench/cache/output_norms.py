"""What a token's value adds to the residual stream: the norm of W_o v, for each query head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.cache.observe import Observation
from kvbench.cache.record import LayerRecord, PrefillRecord
from kvbench.errors import UserError
from kvbench.kernels.prefill import block_bytes

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
"""Names of the attention's last linear layer among the families of transformers."""


@dataclass(frozen=True)
class OutputNorms(Observation):
    """||W_o v|| of each prompt token for each query head, with the head's columns of W_o: float32 [B, Hkv, G, T].

    order: 1 or 2, of the norm. It needs the model's weights, so a prefill computes it from the finished record.
    """

    order: Literal[1, 2] = 2
    from_prompt: ClassVar[bool] = False


def output_norms(model: PreTrainedModel, record: PrefillRecord, order: Literal[1, 2]) -> Iterator[Tensor | None]:
    """`OutputNorms` of each recorded layer; None where it has a sliding window."""
    for layer in record.layers:
        yield layer_norms(model, layer.at_home(), order) if layer.scoring.window is None else None


def layer_norms(model: PreTrainedModel, layer: LayerRecord, order: Literal[1, 2]) -> Tensor:
    """`OutputNorms` of one layer. Raises UserError for latent attention and where W_o is not found."""
    if layer.is_shared:
        raise UserError(
            "norms of W_o v need a value for each head, and latent attention has none; choose a method without them"
        )
    value = layer.value.float()
    weight = output_weight(model, layer.index).float()  # [hidden, Hq * Dv]
    by_head = weight.unflatten(1, (value.shape[1], -1, value.shape[-1]))  # [hidden, Hkv, G, Dv]
    norms = value.new_empty(*value.shape[:2], by_head.shape[2], value.shape[2])
    height = max(1, block_bytes(value.device) // (4 * norms.shape[0] * norms.shape[1] * norms.shape[2] * len(weight)))
    for start in range(0, value.shape[2], height):
        added = torch.einsum("bhtd,ohgd->bhgto", value[:, :, start : start + height], by_head)
        norms[..., start : start + height] = added.norm(p=order, dim=-1)
    return norms


def output_weight(model: PreTrainedModel, index: int) -> Tensor:
    """The output projection's weight of a layer, [hidden, Hq * Dv]. Raises UserError where none is found."""
    layers = getattr(model.get_decoder(), "layers", None)
    attention = None if layers is None else getattr(layers[index], "self_attn", None)
    for name in OUTPUT_PROJECTIONS if attention is not None else ():
        if isinstance(projection := getattr(attention, name, None), nn.Linear):
            return projection.weight
    raise UserError(
        f"{type(model).__name__}: the output projection of layer {index} was not found, and norms of W_o v need it; "
        "choose a method without them"
    )
