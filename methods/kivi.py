"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvbench.cache.groups import check_groups
from kvbench.cache.layer_bits import Bits, at_layer, layer_bits, one_width, widths_of
from kvbench.cache.residual import PerChannel, PerToken, Side
from kvbench.cache.rule import is_whole
from kvbench.cache.store import SlotShape, Store
from kvbench.cache.two_sides import TwoSides
from kvbench.errors import UserError
from kvbench.methods.kivi_captured import CapturedKivi

AXES: dict[str, type[Side]] = {"channel": PerChannel, "token": PerToken}


@dataclass(frozen=True)
class Kivi(Store):
    """KIVI (Liu et al., 2024, arXiv:2402.02750).

    Keys, after rotary embedding: groups of `group_size` consecutive tokens, one scale per channel. The residual holds
    the newest keys in full precision; once it has `residual_length` tokens, all of them are quantised. Values: groups
    of `group_size` channels within a token; all but the newest `residual_length` tokens are quantised. A quantised
    token is never quantised again. Bits per value: bits + 32 / group_size. `k_bits`, `v_bits`: one width, or one for
    each layer as {0: 8, 1: 8, rest: 4}, by the model's numbers of layers.

    `k_axis`, `v_axis`: one scale per "channel" or per "token". The paper uses channel for keys and token for values,
    and shows in its table 2 how the other choices fail.
    """

    k_bits: Bits = 4
    v_bits: Bits = 4
    group_size: int = 32
    residual_length: int = 128
    k_axis: Literal["channel", "token"] = "channel"
    v_axis: Literal["channel", "token"] = "token"

    writable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for knob in ("k_bits", "v_bits"):
            object.__setattr__(self, knob, layer_bits(knob, getattr(self, knob)))
        check_groups("KIVI", self.group_size, *widths_of(self.k_bits, self.v_bits))
        if not is_whole(self.residual_length) or self.residual_length < 1 or self.residual_length % self.group_size:
            raise UserError(
                f"residual={self.residual_length} is not a multiple of group={self.group_size}; "
                f"type residual={4 * self.group_size}, for example"
            )
        for knob, axis in (("k_axis", self.k_axis), ("v_axis", self.v_axis)):
            if axis not in AXES:
                raise UserError(
                    f"{knob}={axis} for KIVI; type {knob}=channel or {knob}=token (one scale per channel or per token)"
                )

    def check(self, key_dim: int, value_dim: int) -> None:
        for axis, width in ((self.k_axis, key_dim), (self.v_axis, value_dim)):
            if axis == "token":  # groups of channels
                check_groups("KIVI", self.group_size, head_dim=width)

    def at_layer(self, index: int) -> "Kivi":
        return replace(self, k_bits=at_layer(self.k_bits, index), v_bits=at_layer(self.v_bits, index))

    def allocate(self, shape: SlotShape) -> "KiviSlots":
        return KiviSlots(self, shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        k_bits, v_bits = one_width("k_bits", self.k_bits), one_width("v_bits", self.v_bits)
        sides = ((self.k_axis, k_bits, shape.key_dim), (self.v_axis, v_bits, shape.value_dim))
        return sum(
            AXES[axis].planned_bytes(bits, self.group_size, self.residual_length, width, shape)
            for axis, bits, width in sides
        )


class KiviSlots(TwoSides[Side]):
    """The keys and the values of one layer, each [quantised | residual]."""

    def __init__(self, store: Kivi, shape: SlotShape) -> None:
        group, residual = store.group_size, store.residual_length
        k_bits, v_bits = one_width("k_bits", store.k_bits), one_width("v_bits", store.v_bits)
        self.keys = AXES[store.k_axis](k_bits, group, residual, shape.key_dim, shape)
        self.values = AXES[store.v_axis](v_bits, group, residual, shape.value_dim, shape)

    @property
    def has_quantised(self) -> bool:
        return self.keys.groups.length > 0 or self.values.groups.length > 0

    def captured(self) -> CapturedKivi:
        return CapturedKivi(self, self.keys, self.values)
