"""Asymmetric group quantisation and the packing of its codes.

A group is the last dimension of the input. The rule is KIVI's (Liu et al., 2024, arXiv:2402.02750, section 3):
`scale = (max - min) / (2^bits - 1)`, `code = round((x - min) / scale)`, and back `code * scale + min`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (8, 4, 2)
"""Code widths that KIVI allows; `pack` allows 3 as well."""


def quantise(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and minimum of each group.

    Args:
        groups: [..., G], any float dtype; a group is the last dimension.
        bits: width of a code.

    Returns:
        codes uint8 [..., G] in 0 .. 2^bits - 1; scale and minimum float16 [...].

    The codes are computed in float32 against the *stored* float16 pair, so encoding a decoded group again gives
    the same codes. A stored scale of 0 (constant group, or a range too small for float16) gives code 0.
    """
    levels = 2**bits - 1
    x = groups.to(torch.float32)
    low, high = x.amin(-1), x.amax(-1)
    limit = torch.finfo(torch.float16).max
    scale = ((high - low) / levels).clamp(max=limit).to(torch.float16)
    minimum = low.clamp(-limit, limit).to(torch.float16)
    stored_scale = scale.to(torch.float32).unsqueeze(-1)
    steps = (x - minimum.to(torch.float32).unsqueeze(-1)) / stored_scale
    codes = torch.where(stored_scale > 0, steps, torch.zeros_like(steps)).clamp(0, levels).round()
    return codes.to(torch.uint8), scale, minimum


@dataclass(frozen=True)
class Encoding:
    """A rule by which groups become codes.

    quantise: groups [..., G] and the bits of a code -> codes uint8 [..., G], scale and minimum float16 [...].
    is_centred: the minimum is None: it is -2^(bits - 1) times the scale and takes no bytes.
    """

    quantise: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor | None]]
    is_centred: bool = False

    @property
    def pair_bytes(self) -> int:
        """Bytes of a group beside its codes."""
        return 2 if self.is_centred else 4


KIVI = Encoding(quantise)


def dequantise(codes: Tensor, scale: Tensor, minimum: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`codes * scale + minimum`: [..., G] from codes [..., G] and a pair [...]."""
    return torch.addcmul(minimum.to(dtype).unsqueeze(-1), codes.to(dtype), scale.to(dtype).unsqueeze(-1))


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., G] -> bytes [..., G * bits / 8].

    Byte i holds codes i, i + n, i + 2n, ... (n bytes a group) from the low bits up, so that unpacking is one shift
    and one mask over whole vectors. 3-bit codes are their two low bits, packed so, followed by their high bit: 32 codes
    take three 32-bit words.
    """
    if bits == 8:
        return codes.contiguous()
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    lanes = codes.unflatten(-1, (8 // bits, codes.shape[-1] * bits // 8))
    packed: Tensor = lanes[..., 0, :].clone()
    for i in range(1, 8 // bits):
        packed |= lanes[..., i, :] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: bytes [..., n] -> uint8 codes [..., n * 8 / bits]."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.tensor_split([packed.shape[-1] // 3 * 2], dim=-1)
        return unpack(low, 2) | unpack(high, 1) << 2
    mask = 2**bits - 1
    return torch.cat([(packed >> (bits * i)) & mask for i in range(8 // bits)], dim=-1)
