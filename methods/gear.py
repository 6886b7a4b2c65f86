"""GEAR: codes, a low rank of what they miss, and outliers held apart."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.cache.gear_rows import GearBlocks, GearSide
from kvbench.cache.groups import check_groups
from kvbench.cache.residual import WholeBlocks
from kvbench.cache.rule import is_whole
from kvbench.cache.store import SlotShape, Store
from kvbench.cache.two_sides import TwoSides
from kvbench.errors import UserError


@dataclass(frozen=True)
class Gear(Store):
    """GEAR (Kang et al., 2024, arXiv:2403.05527), with KIVI's axes: keys per channel, values per token.

    Once the residual holds `residual_length` tokens they are encoded together, for each KV head by itself. The
    `outliers` share of each key channel and of each value token, half of it the smallest and half the largest numbers,
    is held apart in float16 with 16-bit places, and the mean takes their place. The rest becomes codes in groups of
    `group_size`. Of what the codes miss the leading `factors` directions are held in float16. With factors=0 and
    outliers=0 only codes are left.

    What differs from the paper: a prompt is encoded in blocks as decoded tokens are, where the paper takes one low rank
    for the whole prompt; the directions are exact, where it iterates; outliers of a value token are picked in each KV
    head, where the authors' code picks them over all heads. The mean in the place of outliers is the authors' code's.
    """

    k_bits: int = 4
    v_bits: int = 4
    group_size: int = 32
    residual_length: int = 128
    factors: int = 4
    outliers: float = 0.02

    writable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_groups("gear", self.group_size, self.k_bits, self.v_bits)
        if not is_whole(self.residual_length) or self.residual_length < 1 or self.residual_length % self.group_size:
            raise UserError(
                f"residual={self.residual_length} is not a multiple of group={self.group_size}; "
                f"type residual={4 * self.group_size}, for example"
            )
        if not is_whole(self.factors) or self.factors < 0:
            raise UserError(f"factors={self.factors} for gear; type a whole number from 0 on, for example factors=4")
        share = self.outliers
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
            raise UserError(f"outliers={share} for gear; type a share from 0 on and below 1, for example outliers=0.02")

    def check(self, key_dim: int, value_dim: int) -> None:
        check_groups("gear", self.group_size, head_dim=value_dim)
        if self.factors > min(key_dim, value_dim, self.residual_length):
            most = min(key_dim, value_dim, self.residual_length)
            raise UserError(
                f"factors={self.factors} for gear with {most} channels or tokens; type factors={most} or less"
            )

    def sides(self) -> tuple[GearSide, GearSide]:
        """How keys and values are held."""
        rest = self.group_size, self.residual_length, self.factors, self.outliers
        return GearSide("token", self.k_bits, *rest), GearSide("channel", self.v_bits, *rest)

    def allocate(self, shape: SlotShape) -> "GearSlots":
        return GearSlots(self, shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        keys, values = self.sides()
        return keys.planned_bytes(shape.key_dim, shape) + values.planned_bytes(shape.value_dim, shape)


class GearSlots(TwoSides[WholeBlocks[GearBlocks]]):
    """The keys and the values of one layer, each [blocks | residual]."""

    def __init__(self, store: Gear, shape: SlotShape) -> None:
        widths = shape.key_dim, shape.value_dim
        self.keys, self.values = (
            WholeBlocks(GearBlocks(side, width, shape), side.block, width, shape)
            for side, width in zip(store.sides(), widths, strict=True)
        )

    @property
    def has_quantised(self) -> bool:
        return self.keys.groups.length > 0
