"""Per-token quantisation whose slots can be overwritten one by one: the store for rules that evict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.cache.groups import Groups, check_groups
from kvbench.cache.store import Buffer, Slots, SlotShape, Store
from kvbench.kernels.parts import Part


@dataclass(frozen=True)
class PerToken(Store):
    """Keys and values in groups of `group_size` channels within a token, with KIVI's float16 pair; no residual.

    Keys lose more than with KIVI's per-channel groups, for their outliers sit in channels (Liu et al., 2024,
    arXiv:2402.02750, section 3.2); in return a slot can be replaced, so that `method=h2o store=int4` is real.
    """

    k_bits: int = 4
    v_bits: int = 4
    group_size: int = 32

    def __post_init__(self) -> None:
        check_groups("this store", self.group_size, self.k_bits, self.v_bits)

    def check(self, key_dim: int, value_dim: int) -> None:
        check_groups("this store", self.group_size, self.k_bits, head_dim=key_dim)
        check_groups("this store", self.group_size, self.v_bits, head_dim=value_dim)

    def allocate(self, shape: SlotShape) -> "PerTokenSlots":
        return PerTokenSlots(self, shape)


class PerTokenSlots(Slots):
    """Codes of every slot's key and value."""

    def __init__(self, store: PerToken, shape: SlotShape) -> None:
        self.keys = Groups("channel", store.k_bits, store.group_size, shape.slots, shape.key_dim, shape)
        self.values = Groups("channel", store.v_bits, store.group_size, shape.slots, shape.value_dim, shape)

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.length += key.shape[2]

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.keys.overwrite(slot, key)
        self.values.overwrite(slot, value)

    @property
    def has_quantised(self) -> bool:
        return self.length > 0

    def key_parts(self) -> Sequence[Part]:
        return self.keys.parts()

    def value_parts(self) -> Sequence[Part]:
        return self.values.parts()

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers(kept)
        yield from self.values.buffers(kept)
