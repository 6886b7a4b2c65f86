"""Cache layers in captured form: the same memory, and one decode step of which a replay needs no Python."""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from kvbench.cache.counters import BlockCounters, DeviceCounters
from kvbench.cache.held import push_queries
from kvbench.cache.layer import SlotLayer, SlotView
from kvbench.cache.layer_base import EngineLayer
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rule import EMPTY
from kvbench.cache.slots import CapturedSlots
from kvbench.kernels import LengthsKernel
from kvbench.kernels.prefill import Scoring


class CapturedLayer(EngineLayer):
    """A `SlotLayer` for steps of one token. Host numbers that a step reads never change; all else is on the device.

    slot: int64 [B, Hkv, 1], where the next token goes in a layer that evicts. It is a view of the eager layer's stack
    of free slots, so the eager layer can go on at any time.
    """

    def __init__(self, layer: SlotLayer, slots: CapturedSlots, device: DeviceCounters, kernel: LengthsKernel) -> None:
        super().__init__(layer.counters)
        self.layer, self.slots, self.device, self.kernel = layer, slots, device, kernel
        self.evicts = layer.evicts_to is not None and layer.capacity > layer.evicts_to
        self.in_blocks = self.evicts and evicts_in_blocks(layer)
        self.reads = self.evicts and layer.scores is not None and layer.rule.reads_attention
        self.has_holes = self.in_blocks or layer.counters.free > 1  # after forwards of several tokens
        self.slot = next_slot(layer)
        if layer.counters.free == 0:
            self.slot.fill_(layer.counters.written)

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["CapturedLayer", Tensor]:
        """Write one token, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], and return the layer itself in place of keys."""
        key, value = self.layer.keys_and_values(key, value)
        slot = self._slot(key)
        position = self.device.seen.to(torch.int32)
        self.layer.put(slot, position, key, value, partial(self.slots.write, self.device))
        return self, value

    def _slot(self, key: Tensor) -> Tensor:
        """Where the new token of key [B, Hkv, 1, D] goes: int64 [B, Hkv, 1]."""
        behind = self.device.newest.expand(*key.shape[:2], 1)
        if not isinstance(self.device, BlockCounters):
            return self.slot if self.evicts else behind
        free = self.device.free
        return torch.where(free > 0, self.layer.free.index_select(-1, (free - 1).clamp(min=0)), behind)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the newest token over the slots, [B, Hq, 1, Dv]; then eviction and quantisation."""
        view = SlotView(
            self.kernel.attend,
            self.slots.key_parts(),
            self.slots.value_parts(),
            self.layer.capacity,
            self._visible(scoring),
            self.device.evicted,
            self.device.lengths,
        )
        output = self.layer.attended(query, scoring, view, self.reads)
        push_queries(self.layer.queries, query, self.layer.latents)
        if self.evicts and not self.in_blocks:
            self._evict()
        self.slots.settle(self.device)
        return output

    def _visible(self, scoring: Scoring) -> Tensor | None:
        """Which slots the newest token sees, [B, Hkv, 1, S]; None where it sees all that are written."""
        position, seen = self.layer.position, self.device.seen
        if scoring.window is not None:
            in_reach: Tensor = (position <= seen) & (position >= scoring.first_seen(seen))
            return (in_reach & (position != EMPTY)).unsqueeze(2)
        return (position != EMPTY).unsqueeze(2) if self.has_holes else None

    def _evict(self) -> None:
        """Empty the slot of the lowest priority where the layer keeps too many; the next token goes there."""
        layer, device = self.layer, self.device
        newest = cast(int, device.seen)  # rules only compute with it
        victim = layer.victims(layer.capacity, newest, 1)
        unused = torch.where(device.over, victim, device.newest + 1)
        if layer.carried is not None:
            layer.merge(victim, self.slots.key_parts(), self.slots.value_parts(), unused, device.over)
        position = layer.position.gather(-1, victim)
        layer.position.scatter_(-1, victim, torch.where(device.over, EMPTY, position))
        self.slot.copy_(unused)

    def flush(self) -> None:
        """Evict a block where the layer evicts blocks; else quantise what the slots have to."""
        if not isinstance(self.device, BlockCounters):
            return self.slots.flush(self.device)
        layer, block = self.layer, self.device.block
        newest = cast(int, self.device.seen - 1)  # rules only compute with it
        victims = layer.victims(self.counters.written, newest, block)
        layer.position.scatter_(-1, victims, EMPTY)
        top = self.counters.free  # the host has counted the eviction
        layer.free[..., top - block : top] = victims

    def prepare(self) -> None:
        """On the host, before a step: make room for a token behind the last one."""
        if not self.counters.free:
            self.slots.prepare()

    def count(self) -> bool:
        """On the host: follow one step that has run; returns whether `flush` has to run now."""
        evicted = self.counters.evicted
        if self.counters.follow_step():
            self.slots.count()
        if self.in_blocks:
            return self.counters.evicted > evicted
        if is_due := self.slots.flush_is_due:
            self.slots.count_flush()
        return is_due

    def mutable_state(self) -> list[Tensor]:
        """Tensors that a step changes, except slots that had not been written before it."""
        layer = self.layer
        own = [layer.free, layer.position] if layer.plan.has_positions else [layer.free]
        if layer.carried is not None:  # merging overwrites any slot
            own += [layer.carried, *(buffer.tensor for buffer in layer.slots.buffers(0))]
        return [*own, *(tensor for tensor in (layer.scores, layer.queries) if tensor is not None)]


class CapturedRagged(EngineLayer):
    """A `RaggedLayer` for steps of one token: the same memory, read as far as the longest head can ever reach.

    position: int64 [], the new token's position; its owner advances it. slot: int64 [B, Hkv, 1], where the next token
    goes in a layer that evicts, a view of the eager layer's stack of free slots. device: None, since each head counts
    by its own length.
    """

    device = None

    def __init__(self, layer: RaggedLayer, position: Tensor) -> None:
        super().__init__(layer.counters)
        self.layer, self.position, self.evicts = layer, position, layer.evicts_to is not None
        self.slots = layer.table.shape[2] * layer.pool.block_size
        self.slot = next_slot(layer)
        if self.evicts and layer.counters.free == 0:
            self.slot.copy_(layer.lengths.unsqueeze(-1))

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["CapturedRagged", Tensor]:
        """Write one token, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], and return the layer itself in place of keys."""
        lengths = self.layer.lengths
        behind = lengths.unsqueeze(-1)
        slot = self.slot if self.evicts else behind
        if self.evicts and self.layer.grows is not None:
            slot = torch.where(self.layer.grows[:, None], behind, slot)
        self.layer.put(slot, self.position.to(torch.int32), key, value)
        lengths.copy_(torch.maximum(lengths, slot.squeeze(-1) + 1))
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the newest token over the slots, [B, Hq, 1, Dv]; then eviction."""
        visible = (self.layer.positions(self.slots) != EMPTY).unsqueeze(2) if self.evicts else None
        output = self.layer.attended(query, scoring, self.slots, visible)
        if self.evicts:
            self.slot.copy_(self.layer.victims(self.slots, cast(int, self.position), 1))  # rules only compute
        return output

    def prepare(self) -> None:
        """Do nothing: all blocks have been taken."""

    def count(self) -> bool:
        """On the host: follow one step that has run; nothing has to be flushed."""
        self.counters.follow_step()
        return False

    def mutable_state(self) -> list[Tensor]:
        """Tensors that a step changes, except rows that had not been written before it."""
        layer = self.layer
        return [layer.free, layer.position, layer.lengths, *([] if layer.scores is None else [layer.scores])]


def evicts_in_blocks(layer: SlotLayer | RaggedLayer) -> bool:
    """Whether evictions run apart from the steps: several tokens at once, or by scores of all tokens anew."""
    return layer.evicts_to is not None and (layer.rule.rescores or layer.rule.evicts_every > 1)


def next_slot(layer: SlotLayer | RaggedLayer) -> Tensor:
    """Where a captured step of one token finds its slot, [B, Hkv, 1]: the top of the layer's stack of free slots."""
    top = max(0, layer.counters.free - 1)
    return layer.free[..., top : top + 1]
