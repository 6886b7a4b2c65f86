"""Per-token quantisation whose slots can be overwritten one by one, for rules that evict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.groups import Groups, check_groups, planned_groups
from kvbench.cache.hadamard import hadamard
from kvbench.cache.store import Buffer, CapturedSlots, Slots, SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels.parts import Part, read_all

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

    mergeable = True
    holds_latents = True

    def __post_init__(self) -> None:
        check_groups("this store", self.group_size, self.k_bits, self.v_bits, widths=WIDTHS)
        if not isinstance(self.rotate, bool):
            raise UserError(f"rotate={self.rotate} for this store; type true (as store=rot4) or false (as store=int4)")

    def check(self, key_dim: int, value_dim: int) -> None:
        check_groups("this store", self.group_size, head_dim=key_dim)
        check_groups("this store", self.group_size, head_dim=value_dim)

    def allocate(self, shape: SlotShape) -> "PerTokenSlots":
        return PerTokenSlots(self, shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        keys = planned_groups(self.k_bits, self.group_size, shape.slots, shape.key_dim, shape)
        return keys + planned_groups(self.v_bits, self.group_size, shape.slots, shape.value_dim, shape)


class PerTokenSlots(Slots):
    """Codes of every slot's key and value."""

    def __init__(self, store: PerToken, shape: SlotShape) -> None:
        self.turn = hadamard if store.rotate else unturned
        self.wide = torch.promote_types(shape.dtype, torch.float32)
        self.keys = Groups("channel", store.k_bits, store.group_size, shape.slots, shape.key_dim, shape)
        self.values = Groups("channel", store.v_bits, store.group_size, shape.slots, shape.value_dim, shape)

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(self.turn(key))
        self.values.append(self.turn(value))
        self.length += key.shape[2]

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys.overwrite(slot, self.turn(key))
        self.values.overwrite(slot, self.turn(value))

    def read(self, keys: Sequence[Part], values: Sequence[Part]) -> tuple[Tensor, Tensor]:
        return self.turn(read_all(keys, self.wide)), self.turn(read_all(values, self.wide))

    def transform_query(self, query: Tensor) -> Tensor:
        return self.turn(query)

    def restore_keys(self, key: Tensor) -> Tensor:
        return self.turn(key)

    def restore_output(self, output: Tensor) -> Tensor:
        return self.turn(output)  # the matrix is symmetric, its own inverse

    @property
    def has_quantised(self) -> bool:
        return self.length > 0

    def key_parts(self) -> Sequence[Part]:
        return self.keys.parts()

    def value_parts(self) -> Sequence[Part]:
        return self.values.parts()

    def captured(self) -> CapturedSlots:
        return CapturedSlots(self, [self.keys.whole()], [self.values.whole()])

    def count(self) -> None:
        self.length += 1
        self.keys.length = self.values.length = self.length

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers(kept)
        yield from self.values.buffers(kept)


def unturned(x: Tensor) -> Tensor:
    """x, where nothing is rotated."""
    return x
