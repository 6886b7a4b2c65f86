"""KIVI: keys quantised per channel, values per token, the newest tokens in full precision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.cache.groups import check_groups
from kvbench.cache.residual import PerChannel, PerToken, Side
from kvbench.cache.rule import is_whole
from kvbench.cache.store import Buffer, Slots, SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels.parts import Part
from kvbench.methods.kivi_captured import CapturedKivi

AXES: dict[str, type[Side]] = {"channel": PerChannel, "token": PerToken}


@dataclass(frozen=True)
class Kivi(Store):
    """KIVI (Liu et al., 2024, arXiv:2402.02750).

    Keys, after rotary embedding: groups of `group_size` consecutive tokens, one scale per channel. The residual holds
    the newest keys in full precision; once it has `residual_length` tokens, all of them are quantised. Values: groups
    of `group_size` channels within a token; all but the newest `residual_length` tokens are quantised. A quantised
    token is never quantised again. Bits per value: bits + 32 / group_size.

    `k_axis`, `v_axis`: one scale per "channel" or per "token". The paper uses channel for keys and token for values,
    and shows in its table 2 how the other choices fail.
    """

    k_bits: int = 4
    v_bits: int = 4
    group_size: int = 32
    residual_length: int = 128
    k_axis: Literal["channel", "token"] = "channel"
    v_axis: Literal["channel", "token"] = "token"

    writable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_groups("KIVI", self.group_size, self.k_bits, self.v_bits)
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

    def allocate(self, shape: SlotShape) -> "KiviSlots":
        return KiviSlots(self, shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        sides = ((self.k_axis, self.k_bits, shape.key_dim), (self.v_axis, self.v_bits, shape.value_dim))
        return sum(
            AXES[axis].planned_bytes(bits, self.group_size, self.residual_length, width, shape)
            for axis, bits, width in sides
        )


class KiviSlots(Slots):
    """The keys and the values of one layer, each [quantised | residual]."""

    def __init__(self, store: Kivi, shape: SlotShape) -> None:
        group, residual = store.group_size, store.residual_length
        self.keys = AXES[store.k_axis](store.k_bits, group, residual, shape.key_dim, shape)
        self.values = AXES[store.v_axis](store.v_bits, group, residual, shape.value_dim, shape)

    def fill(self, key: Tensor, value: Tensor) -> None:
        self.keys.fill(key)
        self.values.fill(value)
        self.length += key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.length += key.shape[2]

    def settle(self) -> None:
        self.keys.settle()
        self.values.settle()

    @property
    def has_quantised(self) -> bool:
        return self.keys.groups.length > 0 or self.values.groups.length > 0

    def key_parts(self) -> Sequence[Part]:
        return self.keys.parts()

    def value_parts(self) -> Sequence[Part]:
        return self.values.parts()

    def captured(self) -> CapturedKivi:
        return CapturedKivi(self, self.keys, self.values)

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers()
        yield from self.values.buffers()
