"""Per-token quantisation whose slots can be overwritten one by one, for rules that evict."""

from dataclasses import dataclass

from kvbench.cache.groups import Groups, check_groups, planned_groups
from kvbench.cache.row_slots import HADAMARD, NO_TURN, RowSlots
from kvbench.cache.store import SlotShape, Store
from kvbench.errors import UserError

WIDTHS = (8, 4, 3, 2)


@dataclass(frozen=True)
class PerToken(Store):
    """Keys and values in groups of `group_size` channels within a token, with a float16 scale and minimum as in KIVI.

    There is no residual: a token is quantised in its own step, and attends to its quantised self.

    With `rotate` keys and values are held after one orthogonal Hadamard matrix, which spreads outlier channels (QuaRot:
    Ashkboos et al., 2024, arXiv:2404.00456). The query is rotated too and the output is rotated back, so q . k is
    unchanged.

    Keys lose more precision than in KIVI's per-channel groups, because their outliers are in channels (Liu et al.,
    2024, arXiv:2402.02750, section 3.2). In return single slots can be overwritten, so rules can evict.
    """

    k_bits: int = 4
    v_bits: int = 4
    group_size: int = 32
    rotate: bool = False

    holds_latents = True

    def __post_init__(self) -> None:
        check_groups("this store", self.group_size, self.k_bits, self.v_bits, widths=WIDTHS)
        if not isinstance(self.rotate, bool):
            raise UserError(f"rotate={self.rotate} for this store; type true (as store=rot4) or false (as store=int4)")

    def check(self, key_dim: int, value_dim: int) -> None:
        check_groups("this store", self.group_size, head_dim=key_dim)
        check_groups("this store", self.group_size, head_dim=value_dim)

    def allocate(self, shape: SlotShape) -> RowSlots:
        turn = HADAMARD if self.rotate else NO_TURN
        keys = Groups("channel", self.k_bits, self.group_size, shape.slots, shape.key_dim, shape)
        values = Groups("channel", self.v_bits, self.group_size, shape.slots, shape.value_dim, shape)
        return RowSlots(keys, values, turn, turn)

    def planned_bytes(self, shape: SlotShape) -> int:
        keys = planned_groups(self.k_bits, self.group_size, shape.slots, shape.key_dim, shape)
        return keys + planned_groups(self.v_bits, self.group_size, shape.slots, shape.value_dim, shape)
