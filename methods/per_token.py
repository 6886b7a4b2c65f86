"""Per-token quantisation whose slots can be overwritten one by one, for rules that evict."""

from dataclasses import dataclass, replace

from kvbench.cache.groups import Groups, check_groups, planned_groups
from kvbench.cache.layer_bits import Bits, at_layer, layer_bits, one_width, widths_of
from kvbench.cache.row_slots import HADAMARD, NO_TURN, RowSlots
from kvbench.cache.store import SlotShape, Store
from kvbench.errors import UserError

WIDTHS = (8, 4, 3, 2)


@dataclass(frozen=True)
class PerToken(Store):
    """Keys and values in groups of `group_size` channels within a token, with a float16 scale and minimum as in KIVI.

    `k_bits`, `v_bits`: one width, or one for each layer as {0: 8, 1: 8, rest: 4}, by the model's numbers of layers.

    There is no residual: a token is quantised in its own step, and attends to its quantised self.

    With `rotate` keys and values are held after one orthogonal Hadamard matrix, which spreads outlier channels (QuaRot:
    Ashkboos et al., 2024, arXiv:2404.00456). The query is rotated too and the output is rotated back, so q . k is
    unchanged.

    Keys lose more precision than in KIVI's per-channel groups, because their outliers are in channels (Liu et al.,
    2024, arXiv:2402.02750, section 3.2). In return single slots can be overwritten, so rules can evict.
    """

    k_bits: Bits = 4
    v_bits: Bits = 4
    group_size: int = 32
    rotate: bool = False

    mergeable = True
    holds_latents = True

    def __post_init__(self) -> None:
        for knob in ("k_bits", "v_bits"):
            object.__setattr__(self, knob, layer_bits(knob, getattr(self, knob)))
        check_groups("this store", self.group_size, *widths_of(self.k_bits, self.v_bits), widths=WIDTHS)
        if not isinstance(self.rotate, bool):
            raise UserError(f"rotate={self.rotate} for this store; type true (as store=rot4) or false (as store=int4)")

    def check(self, key_dim: int, value_dim: int) -> None:
        check_groups("this store", self.group_size, head_dim=key_dim)
        check_groups("this store", self.group_size, head_dim=value_dim)

    def at_layer(self, index: int) -> "PerToken":
        return replace(self, k_bits=at_layer(self.k_bits, index), v_bits=at_layer(self.v_bits, index))

    def allocate(self, shape: SlotShape) -> RowSlots:
        k_bits, v_bits = one_width("k_bits", self.k_bits), one_width("v_bits", self.v_bits)
        turn = HADAMARD if self.rotate else NO_TURN
        keys = Groups("channel", k_bits, self.group_size, shape.slots, shape.key_dim, shape)
        values = Groups("channel", v_bits, self.group_size, shape.slots, shape.value_dim, shape)
        return RowSlots(keys, values, shape, turn, turn)

    def planned_bytes(self, shape: SlotShape) -> int:
        k_bits, v_bits = one_width("k_bits", self.k_bits), one_width("v_bits", self.v_bits)
        keys = planned_groups(k_bits, self.group_size, shape.slots, shape.key_dim, shape)
        return keys + planned_groups(v_bits, self.group_size, shape.slots, shape.value_dim, shape)
