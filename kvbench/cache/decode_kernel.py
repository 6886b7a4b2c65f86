"""The kernel that a method's caches decode on."""

import torch
from transformers import PreTrainedModel

from kvbench.cache.method import Method
from kvbench.cache.slots import SlotShape
from kvbench.kernels import Kernel, ReferenceKernel, choose
from kvbench.models.shape import shape_of

PROBE = 512
"""Tokens in the slots by which a kernel is asked whether it reads a store: enough for usual residuals to quantise."""


def decode_kernel(
    method: Method, model: PreTrainedModel, dtype: torch.dtype, wanted: str, device: torch.device | None = None
) -> Kernel:
    """The kernel named `wanted` (see `kvbench.kernels.choose`), or the reference where that kernel cannot read the
    store; the reference then carries the reason. Rows name the kernel that really runs.

    device: of the layer, where a device map spreads layers; None: the model's.
    """
    device = model.device if device is None else device
    kernel = choose(device, dtype, wanted)
    shape, store = shape_of(model.config), method.store
    if kernel.name == "triton" and (method.rule.ragged_heads or store.in_blocks):
        return ReferenceKernel("the Triton kernel does not read blocks of a pool")
    if kernel.name == "triton" and shape.mla == "absorbed":
        return ReferenceKernel("the Triton kernel does not read rows whose channels lie in two places")
    if store.calibrates or store.brings_cache or store.in_blocks or shape.mla in ("latent", "absorbed"):
        return kernel
    store.check(shape.head_dim, shape.value_dim)
    widths = shape.head_dim, shape.value_dim
    slots = store.at_layer(0).allocate(SlotShape(1, 1, *widths, PROBE, 1, dtype, device))
    slots.fill(*(torch.zeros(1, 1, PROBE, width, dtype=dtype, device=device) for width in widths))
    slots.settle()
    query = torch.zeros(1, 1, 1, shape.head_dim, dtype=dtype, device=device)
    reason = kernel.refusal(query, slots.key_parts(), slots.value_parts())
    return kernel if reason is None else ReferenceKernel(reason)
