"""ThinK: keys without the channels in which queries and keys are small."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from kvbench.cache.narrow_rows import NarrowRows
from kvbench.cache.observe import Observation, QueryPower
from kvbench.cache.residual import NewestWhole, planned_residual
from kvbench.cache.row_slots import FloatRows
from kvbench.cache.rule import is_whole
from kvbench.cache.store import Buffer, DenseStore, Slots, SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels.parts import Part


@dataclass(frozen=True)
class Think(Store):
    """ThinK (Xu et al., 2024, arXiv:2407.21018): of each key only the `channels` share of channels is held.

    A channel's score is the mean square of the prompt's last 32 queries in it, averaged over the query heads of a KV
    head, times the mean square of the prompt's kept keys. The best channels of each KV head stay, rounded to a whole
    number, 60% by default as in most of the paper's tables. The newest `residual_length` keys keep all channels; a key
    that leaves them is pruned. Values are held as they are. With channels=1 the store is dense.

    What differs: the authors' code repeats keys for every query head and prunes each copy; here the heads that share a
    key decide together, as in kvpress. Its eviction variant never prunes decoded keys; here bytes stay a share of the
    cache however long the answer is.
    """

    channels: float = 0.6
    residual_length: int = 32
    power: Tensor | None = field(default=None, repr=False, compare=False)

    writable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        share = self.channels
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise UserError(f"channels={share} for think; type a share above 0 and up to 1, for example channels=0.6")
        if not is_whole(self.residual_length) or self.residual_length < 1:
            raise UserError(f"residual={self.residual_length} for think; type a whole number, for example residual=32")

    @property
    def static_scales(self) -> bool:
        return self.channels < 1

    def observations(self) -> tuple[Observation, ...]:
        return (QueryPower(),) if self.channels < 1 else ()

    def with_observed(self, observed: Mapping[Observation, Tensor]) -> "Think":
        return replace(self, power=observed.get(QueryPower()))

    def kept(self, width: int) -> int:
        """Channels of a key that are held."""
        return max(1, round(self.channels * width))

    def allocate(self, shape: SlotShape) -> Slots:
        """Slots that, without the prompt's observation, take all queries as equal: for planning."""
        return ThinkSlots(self, shape) if self.channels < 1 else DenseStore().allocate(shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        if self.channels == 1:
            return DenseStore().planned_bytes(shape)
        size, heads = shape.dtype.itemsize, shape.batch * shape.kv_heads
        older, kept = max(0, shape.slots - self.residual_length), self.kept(shape.key_dim)
        keys = heads * kept * (older * size + 8) + planned_residual(self.residual_length, shape.key_dim, shape)
        return keys + heads * shape.slots * shape.value_dim * size


class ThinkSlots(Slots):
    """Keys [pruned | residual], values in rows of the model's dtype."""

    def __init__(self, store: Think, shape: SlotShape) -> None:
        self.power = store.power
        self.narrow = NarrowRows(max(0, shape.slots - store.residual_length), store.kept(shape.key_dim), shape)
        self.keys = NewestWhole(self.narrow, store.residual_length, shape.key_dim, shape)
        self.values = FloatRows(shape.dtype, shape.value_dim, shape)

    def fill(self, key: Tensor, value: Tensor) -> None:
        score = key.float().square().mean(2)
        if self.power is not None:
            score = score * self.power.unflatten(1, (key.shape[1], -1)).mean(2)
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., : self.narrow.channels.shape[-1]]
        self.narrow.channels.copy_(best.sort(-1).values)
        self.keys.fill(key)
        self.values.append(value)
        self.length = key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.length += key.shape[2]

    def settle(self) -> None:
        self.keys.settle()

    @property
    def has_quantised(self) -> bool:
        return self.narrow.length > 0

    def key_parts(self) -> Sequence[Part]:
        return self.keys.parts()

    def value_parts(self) -> Sequence[Part]:
        return self.values.parts()

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.keys.buffers()
        yield from self.values.buffers(kept)
