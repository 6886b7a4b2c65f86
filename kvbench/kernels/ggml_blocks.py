"""ggml's block types (llama.cpp, ggml-quants.c): blocks of 32 numbers become codes and scales, bit for bit as there."""

import torch
from torch import Tensor

from kvbench.kernels.quantise import Encoding

BLOCK = 32


def q8_0(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, None]:
    """Codes plus 128, and scales."""
    x = blocks.to(torch.float32)
    scale = x.abs().amax(-1, keepdim=True) / 127
    steps = x * inverse(scale)
    whole = steps.abs().floor()
    size = whole + (2 * (steps.abs() - whole)).floor()  # as C's roundf: `round` would take halves to even numbers
    return (steps.sign() * size + 128).to(torch.uint8), as_half(scale), None


def q4_0(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, None]:
    """Codes and scales; the number with the largest magnitude has code 0."""
    x = blocks.to(torch.float32)
    scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
    codes = (x * inverse(scale) + 8.5).to(torch.uint8).clamp(max=15)
    return codes, as_half(scale), None


def q4_1(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima."""
    x = blocks.to(torch.float32)
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / 15
    codes = ((x - low) * inverse(scale) + 0.5).to(torch.uint8).clamp(max=15)
    return codes, as_half(scale), as_half(low)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for a block of zeros, or of equal numbers."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def as_half(pair: Tensor) -> Tensor:
    """The pairs [..., 1] as float16 [...], finite."""
    limit = torch.finfo(torch.float16).max
    return pair.squeeze(-1).clamp(-limit, limit).to(torch.float16)


TYPES = {
    "q8_0": (8, Encoding(q8_0, is_centred=True)),
    "q4_0": (4, Encoding(q4_0, is_centred=True)),
    "q4_1": (4, Encoding(q4_1)),
}
"""By name: bits of a code, and how a block is rounded."""
