"""Counters of tokens and slots: on the host, and on the device for a decode step that is captured in a CUDA graph.

A CUDA graph replays kernels and no Python. The captured step therefore advances `DeviceCounters`, and the host follows
each replay with the same `Counters` that the eager step uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class CacheFull(RuntimeError):
    """More tokens were fed than the cache was built for."""


@dataclass
class Counters:
    """How many tokens a layer was fed, keeps and has evicted, and how many of its slots are used.

    All KV heads of a layer accept and evict equally many tokens. Where heads keep different numbers of tokens, the
    counters are those of the longest head. Only the layer that owns the counters advances them.

    capacity: slots in all. step: most tokens of one forward. evicts_to: tokens kept after an eviction, None where the
    layer never evicts. seen: tokens fed so far. written: slots that have been written. free: written slots whose token
    was evicted and that hold no other token yet. evicts_every: how many tokens beyond `evicts_to` are held before an
    eviction.
    """

    capacity: int = 0
    step: int = 1
    evicts_to: int | None = None
    seen: int = 0
    written: int = 0
    free: int = 0
    evicts_every: int = 1

    @property
    def kept(self) -> int:
        """Tokens held now."""
        return self.written - self.free

    @property
    def evicted(self) -> int:
        """Tokens evicted so far, those of the prompt included."""
        return self.seen - self.kept

    @property
    def excess(self) -> int:
        """Tokens to evict before the next forward; 0 until `evicts_every` are beyond `evicts_to`."""
        over = 0 if self.evicts_to is None else self.kept - self.evicts_to
        return over if over >= self.evicts_every else 0

    @property
    def most_written(self) -> int:
        """Slots that will ever be written if every further forward has one token."""
        if self.free:
            return self.written
        return self.capacity if self.evicts_to is None else min(self.capacity, self.evicts_to + self.evicts_every)

    def check_room(self, tokens: int, layer: int) -> None:
        """Raise CacheFull unless one forward of so many tokens fits; `layer` is named in the message."""
        if tokens > self.step:
            raise CacheFull(
                f"{tokens} tokens in one forward, of at most {self.step}; build the cache with max_step={tokens}"
            )
        if self.kept + tokens > self.capacity:
            raise CacheFull(
                f"layer {layer} holds {self.kept} tokens of at most {self.capacity} and got {tokens} more; "
                f"build the cache with a larger max_new_tokens"
            )

    def fill(self, kept: int, seen: int) -> None:
        """A prompt of `seen` tokens has been fed, of which `kept` are in the first slots."""
        self.seen, self.written, self.free = seen, kept, 0

    def accept(self, tokens: int) -> int:
        """New tokens have been written; returns how many of them, the first ones, took free slots."""
        reused = min(tokens, self.free)
        self.free -= reused
        self.written += tokens - reused
        self.seen += tokens
        return reused

    def evict(self, tokens: int) -> None:
        """So many tokens have been evicted; their slots are free now."""
        self.free += tokens

    def follow_step(self) -> bool:
        """Count a captured step of one token; returns whether the token took a slot that had not been written."""
        reused = self.accept(1)
        self.evict(self.excess)
        return reused == 0


class DeviceCounters:
    """The same counters on the device, for layers that count alike, in steps of one token.

    `accept` and `evict` enclose the model's forward. Both only queue work on the device.

    packed: slots whose keys, and whose values, are quantised now. packs: whether every token's key, and its value, is
    quantised at once. seen: int64 [], tokens fed before this step, which is the position of the new token; the whole
    cache has one, and its owner advances it. lengths: int32 [3], slots with quantised keys, with quantised values, and
    written, as kernels read them; this step's token is counted from `accept` on. newest: int64 [1], the slot of a token
    that takes no free slot. evicted: int64 []. over: bool [], whether this step exceeds `evicts_to`.
    """

    def __init__(
        self, counters: Counters, seen: Tensor, packed: tuple[int, int], packs: tuple[bool, bool] = (False, False)
    ) -> None:
        self.seen, self.most_written, self.evicts_to = seen, counters.most_written, counters.evicts_to
        self.lengths = torch.tensor([*packed, counters.written], dtype=torch.int32, device=seen.device)
        self.written = self.lengths[2:]
        self.added = torch.tensor([*packs, True], dtype=torch.int32, device=seen.device)
        self.newest = self.written.long() - 1
        self.evicted = torch.full_like(seen, counters.evicted)
        self.over = torch.zeros_like(seen, dtype=torch.bool)

    def accept(self) -> None:
        """Count the token of this step."""
        self.lengths.add_(self.added).clamp_(max=self.most_written)
        self.newest.copy_(self.written - 1)
        if self.evicts_to is not None:
            self.over.copy_(self.seen + 1 - self.evicted > self.evicts_to)

    def evict(self) -> None:
        """Count the token that this step evicted, if it evicted one."""
        if self.evicts_to is not None:
            self.evicted.add_(self.over)

    def flush(self) -> None:
        """Count the block of tokens that was quantised, where the store quantises blocks."""

    def tensors(self) -> Sequence[Tensor]:
        """Everything that a step changes."""
        return [self.lengths, self.newest, self.evicted, self.over]


class BlockCounters(DeviceCounters):
    """Counters of layers that evict a block of tokens at once, by `flush`; a step evicts nothing.

    free: int64 [1], slots on the stack of free slots. block: tokens that a flush evicts.
    """

    def __init__(
        self, counters: Counters, seen: Tensor, packed: tuple[int, int], packs: tuple[bool, bool] = (False, False)
    ) -> None:
        super().__init__(counters, seen, packed, packs)
        self.free = torch.full_like(self.newest, counters.free)
        self.block = counters.evicts_every

    def evict(self) -> None:
        """Count the free slot that this step's token took, if it took one."""
        self.free.sub_(1).clamp_(min=0)

    def flush(self) -> None:
        """Count the block of tokens that was evicted."""
        self.evicted.add_(self.block)
        self.free.add_(self.block)

    def tensors(self) -> Sequence[Tensor]:
        return [*super().tensors(), self.free]
