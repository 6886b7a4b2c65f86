"""What changes between the steps of a captured decode: counters on the device, and slots that are written by them.

A CUDA graph replays kernels and no Python. So where an eager layer counts on the host, its captured form keeps tensors
that the step itself advances, and the host only follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.kernels.parts import Part, is_packed

if TYPE_CHECKING:
    from kvbench.cache.store import Slots


class CannotCapture(RuntimeError):
    """A cache, or a model, whose decode step cannot be captured in a CUDA graph; the message says why."""


@dataclass(frozen=True)
class Start:
    """What a layer's host counters say when its cache is captured; layers that agree share their `Counts`.

    lengths: slots whose keys are packed, whose values are packed, and filled ones in all. most: slots that will ever
    be filled. evicted: tokens given up so far. budget: tokens kept between steps; None: all.
    """

    lengths: tuple[int, int, int]
    most: int
    evicted: int
    budget: int | None


class Counts:
    """Counters of layers that count alike, in steps of one token; `begin` and `end` enclose the model's forward.

    packs: whether every token's key, and its value, is packed at once. seen: int64 [], tokens fed before this step,
    which is the new token's position; one for the whole cache, advanced by its owner. lengths: int32 [3], as the
    kernels read them; from `begin` on this step's. newest: int64 [1], the slot that a token goes to where none was
    given up. evicted: int64 []. over: bool [], whether this step exceeds the budget.
    """

    def __init__(self, start: Start, seen: Tensor, packs: tuple[bool, bool] = (False, False)) -> None:
        self.seen, self.most, self.budget = seen, start.most, start.budget
        self.lengths = torch.tensor(start.lengths, dtype=torch.int32, device=seen.device)
        self.filled = self.lengths[2:]
        self.added = torch.tensor([*packs, True], dtype=torch.int32, device=seen.device)
        self.newest = self.filled.long() - 1
        self.evicted = torch.full_like(seen, start.evicted)
        self.over = torch.zeros_like(seen, dtype=torch.bool)

    def begin(self) -> None:
        """Count the token that this step brings."""
        self.lengths.add_(self.added).clamp_(max=self.most)
        self.newest.copy_(self.filled - 1)
        if self.budget is not None:
            self.over.copy_(self.seen + 1 - self.evicted > self.budget)

    def end(self) -> None:
        """Count what was given up."""
        if self.budget is not None:
            self.evicted.add_(self.over)

    def flush(self) -> None:
        """Count the block that was quantised, where the store has any."""

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        return [self.lengths, self.newest, self.evicted, self.over]


class CapturedSlots:
    """A layer's slots, over the same memory, written at places that tensors name.

    This one is for stores whose single slots can be overwritten. keys, values: parts that span whole buffers.
    """

    def __init__(self, slots: "Slots", keys: Sequence[Part], values: Sequence[Part]) -> None:
        self.slots, self.keys, self.values = slots, keys, values
        self.packs = is_packed(keys[0]), is_packed(values[0])

    def key_parts(self) -> Sequence[Part]:
        """The keys of all slots, filled or not."""
        return self.keys

    def value_parts(self) -> Sequence[Part]:
        """The values likewise."""
        return self.values

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The host's count, as `Start.lengths`."""
        keys, values = (self.slots.length if packed else 0 for packed in self.packs)
        return keys, values, self.slots.length

    def counts(self, start: Start, seen: Tensor) -> Counts:
        return Counts(start, seen, self.packs)

    def prepare(self) -> None:
        """Host: before a step whose token goes behind the last one."""

    def write(self, counts: Counts, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], into the slots [B, Hkv, 1]."""
        self.slots.overwrite(slot, key, value)

    def settle(self, counts: Counts) -> None:
        """After the attention of each step: quantise what has left a full-precision residual."""

    @property
    def flush_is_due(self) -> bool:
        """Host: whether `flush` has to run before the next step."""
        return False

    def flush(self, counts: Counts) -> None:
        """Quantise a block of a full-precision residual; `counts.flush` follows."""

    def count(self) -> None:
        """Host: a token has been appended."""
        self.slots.count()

    def count_flush(self) -> None:
        """Host: a block has been quantised."""
