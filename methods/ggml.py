"""llama.cpp's quantised caches: blocks of 32 channels of a token, as ggml's types q8_0, q4_0 and q4_1 hold them."""

from dataclasses import dataclass
from functools import partial

from kvbench.cache.groups import Groups, planned_groups
from kvbench.cache.hadamard import hadamard
from kvbench.cache.row_slots import HADAMARD, NO_TURN, RowSlots, Turn
from kvbench.cache.store import SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels.ggml_blocks import BLOCK, TYPES
from kvbench.kernels.quantise import Encoding

ROTATED = 64
"""llama.cpp rotates heads whose size is a multiple of this, and values in blocks of it."""


@dataclass(frozen=True)
class Ggml(Store):
    """Keys as ggml's block type `k_type`, values as `v_type`: "q8_0", "q4_0" or "q4_1" (llama.cpp, ggml-quants.c).

    A block is 32 channels of a token. q8_0: scale = max |x| / 127, codes rounded, halves away from zero. q4_0: scale =
    x / -8 of the x with the largest |x|, code = floor(x / scale + 8.5), at most 15. q4_1: scale = (max - min) / 15,
    code = floor((x - min) / scale + 0.5), at most 15. Scale and minimum are held in float16, codes follow from the
    unrounded ones. Codes, scales and their bytes (34, 18, 20 a block) are ggml's; codes and scales lie in arrays of
    their own, and q8_0's codes are held plus 128. Where ggml's float16 would be infinite, the largest finite number is
    held.

    `rotate`: a Hadamard matrix on keys and queries, of the largest power of two that divides the head size, and one of
    64 on values and outputs, as llama.cpp does by default (since April 2026) with quantised types and head sizes that
    are multiples of 64.

    llama.cpp also rounds the query to 8 bits on a CPU; here queries stay as they are.
    """

    k_type: str = "q8_0"
    v_type: str = "q8_0"
    rotate: bool = False

    def __post_init__(self) -> None:
        for knob, name in (("k_type", self.k_type), ("v_type", self.v_type)):
            if name not in TYPES:
                raise UserError(f"{knob}={name} is none of ggml's types here; type {knob}=q8_0, q4_0 or q4_1")
        if not isinstance(self.rotate, bool):
            raise UserError(f"rotate={self.rotate} for ggml's types; type rotate=true or rotate=false")

    def check(self, key_dim: int, value_dim: int) -> None:
        for width in (key_dim, value_dim):
            if width % BLOCK:
                raise UserError(f"ggml's blocks of {BLOCK} do not divide the head size {width}; choose another store")
            if self.rotate and width % ROTATED:
                raise UserError(
                    f"rotate=true needs a head size that is a multiple of {ROTATED}, as in llama.cpp, and this one is "
                    f"{width}; type rotate=false"
                )

    def allocate(self, shape: SlotShape) -> RowSlots:
        keys, values = (
            Groups("channel", bits, BLOCK, shape.slots, width, shape, encoding)
            for (bits, encoding), width in self._sides(shape)
        )
        return RowSlots(keys, values, shape, *((HADAMARD, IN_64) if self.rotate else (NO_TURN, NO_TURN)))

    def planned_bytes(self, shape: SlotShape) -> int:
        return sum(
            planned_groups(bits, BLOCK, shape.slots, width, shape, encoding)
            for (bits, encoding), width in self._sides(shape)
        )

    def _sides(self, shape: SlotShape) -> tuple[tuple[tuple[int, Encoding], int], ...]:
        return (TYPES[self.k_type], shape.key_dim), (TYPES[self.v_type], shape.value_dim)


IN_64 = Turn(partial(hadamard, most=ROTATED), partial(hadamard, most=ROTATED))
