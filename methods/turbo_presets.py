"""vLLM's TurboQuant presets: codebook or 8-bit keys, uniform values, as its cache slots hold them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.codebook import CodedRows, codebook_bytes, packed_together
from kvbench.cache.groups import Groups, check_groups, planned_groups
from kvbench.cache.row_slots import HADAMARD, NO_TURN, CentredRows, FloatRows, RowSlots
from kvbench.cache.store import SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels.quantise import Encoding

PRESETS = ((8, 4), (4, 4), (3, 4), (3, 3))
"""Bits of keys and of values: k8v4, 4bit_nc, k3v4_nc, 3bit_nc."""


@dataclass(frozen=True)
class TurboPreset(Store):
    """vLLM's `--kv-cache-dtype turboquant_*` (after Zandieh et al., 2025, arXiv:2504.19874).

    Keys of 8 bits (k8v4): e4m3 without a scale, not rotated. Keys of 4 or 3 bits: after a Hadamard matrix, the nearest
    levels of the Lloyd-Max codebook for normal numbers, and the norm in float16. Norm correction ("nc"): the row that
    is read has the norm of the key. Values: not rotated, one scale and one minimum for the whole vector, in float16.
    Bytes a token and KV head at head size 128: 196, 134, 118, 102 (`slot_size` of vLLM's turboquant/config.py).

    What differs from vLLM, for the same bytes: its decode kernel divides by the norm of the levels at every step, here
    the held norm is divided once; codes are packed in another order; the codebook is exact, not integrated in 200
    steps; and all layers are compressed, where vLLM leaves the first and last two of a dense model as they are.

    `center` (not vLLM's): keys are held less the mean of the prompt's kept keys, one vector per KV head, which is
    added again when they are read.
    """

    k_bits: int = 4
    v_bits: int = 4
    center: bool = False

    def __post_init__(self) -> None:
        if (self.k_bits, self.v_bits) not in PRESETS:
            raise UserError(
                f"k_bits={self.k_bits} with v_bits={self.v_bits} is none of vLLM's TurboQuant presets; "
                "type store=turbo_k8v4, turbo_4bit_nc, turbo_k3v4_nc or turbo_3bit_nc"
            )
        if not isinstance(self.center, bool):
            raise UserError(f"center={self.center} for this store; type center=true or center=false")

    @property
    def static_scales(self) -> bool:
        return self.center

    def check(self, key_dim: int, value_dim: int) -> None:
        for width in (key_dim, value_dim):
            check_groups("this store", packed_together(width), head_dim=width)

    def allocate(self, shape: SlotShape) -> RowSlots:
        values = Groups("channel", self.v_bits, shape.value_dim, shape.slots, shape.value_dim, shape, UNIFORM)
        keys: FloatRows | CodedRows
        if self.k_bits == 8:
            keys, turn = FloatRows(torch.float8_e4m3fn, shape.key_dim, shape), NO_TURN
        else:
            keys, turn = CodedRows(self.k_bits, shape.key_dim, shape, keeps_norm=True), HADAMARD
        return RowSlots(CentredRows(keys, shape.key_dim, shape) if self.center else keys, values, shape, turn)

    def planned_bytes(self, shape: SlotShape) -> int:
        heads = shape.batch * shape.kv_heads
        key = shape.key_dim if self.k_bits == 8 else shape.key_dim * self.k_bits // 8 + 2
        once = (0 if self.k_bits == 8 else codebook_bytes(self.k_bits)) + 4 * heads * shape.key_dim * self.center
        values = planned_groups(self.v_bits, shape.value_dim, shape.slots, shape.value_dim, shape)
        return heads * shape.slots * key + values + once


def uniform(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes rounded against the unrounded scale, halves up; a scale is at least 1e-8, which float16 holds as 0."""
    x, levels, limit = groups.to(torch.float32), 2**bits - 1, torch.finfo(torch.float16).max
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / levels).clamp(min=1e-8)
    codes = ((x - low) / scale + 0.5).floor().clamp(0, levels)
    scale, low = (pair.squeeze(-1).clamp(-limit, limit).to(torch.float16) for pair in (scale, low))
    return codes.to(torch.uint8), scale, low


UNIFORM = Encoding(uniform)
