"""A cache in captured form: the same buffers, and one decode step of which a replay needs no Python.

`DecodeStep.run` is what a CUDA graph is made of. It works in any device's memory, so that it can be held against the
eager cache without a GPU.
"""

from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.caches import KVCache, Layer
from kvbench.cache.counts import CannotCapture, CapturedSlots, Counts, Start
from kvbench.cache.forward import forward
from kvbench.cache.layer import SlotLayer, shared_by_heads
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.ragged_captured import CapturedRagged
from kvbench.cache.rule import EMPTY, NO_SCORES, lowest
from kvbench.cache.state import in_model_order
from kvbench.kernels import LengthsKernel
from kvbench.kernels.prefill import Scoring


class CapturedLayer(CacheLayerMixin):
    """A `SlotLayer` for steps of one token. What it holds on the host never changes; all else is on the device.

    slot: int64 [B, Hkv, 1], where the next token goes, in a layer that evicts; a view of the eager layer's stack of
    free slots, which is thereby always right.
    """

    is_sliding = False

    def __init__(self, layer: SlotLayer, slots: CapturedSlots, counts: Counts, kernel: LengthsKernel) -> None:
        super().__init__()
        self.layer, self.slots, self.counts, self.kernel = layer, slots, counts, kernel
        self.n_sink = 0 if layer.rotate_back is None else layer.rule.sinks_in_place
        self.evicts = layer.budget is not None and layer.capacity > layer.budget
        self.reads = self.evicts and layer.scores is not None and layer.rule.reads_attention
        self.has_holes = layer.n_free > 1  # after forwards of several tokens
        top = max(0, layer.n_free - 1)
        self.slot = layer.free[..., top : top + 1]
        if layer.n_free == 0:
            self.slot.fill_(layer.slots.length)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is the eager layer's."""

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["CapturedLayer", Tensor]:
        """Write one token, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], and hand on the layer itself."""
        layer, counts = self.layer, self.counts
        key, value = layer.entries(key, value)
        slot = self.slot if self.evicts else counts.newest.expand(*key.shape[:2], 1)
        if layer.rule.budget is not None:
            layer.position.scatter_(-1, slot, counts.seen.to(torch.int32).expand_as(slot))
        self.slots.write(counts, slot, key, value)
        if layer.scores is not None:
            fresh = layer.scores.new_empty(slot.shape)
            fresh[:] = layer.rule.fresh_scores(key)
            layer.scores.scatter_(-1, slot, fresh)
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the newest token over the slots, [B, Hq, 1, Dv]; then eviction and quantisation."""
        layer, slots, counts = self.layer, self.layer.slots, self.counts
        sink_query = None
        if self.n_sink and layer.rotate_back is not None:
            sink_query = slots.turn_query(layer.rotate_back(query, counts.evicted))
        output, probabilities = self.kernel.attend(
            slots.turn_query(query),
            self.slots.key_parts(),
            self.slots.value_parts(),
            scoring,
            visible=self._visible(scoring),
            sink_query=sink_query,
            n_sink=self.n_sink,
            want_probabilities=self.reads,
            lengths=counts.lengths,
        )
        if layer.scores is not None and probabilities is not None and self.reads:
            shared = shared_by_heads(probabilities[..., : layer.capacity], layer.scores.shape[1])
            layer.scores.copy_(layer.rule.updated_scores(layer.scores, shared))
        if self.evicts:
            self._evict()
        self.slots.settle(counts)
        return slots.turn_back(output)

    def _visible(self, scoring: Scoring) -> Tensor | None:
        """Which slots the newest token sees, [B, Hkv, 1, S]; None where it sees all that are filled."""
        position, seen = self.layer.position, self.counts.seen
        if scoring.window is not None:
            in_reach: Tensor = (position <= seen) & (position >= scoring.first_seen(seen))
            return (in_reach & (position != EMPTY)).unsqueeze(2)
        return (position != EMPTY).unsqueeze(2) if self.has_holes else None

    def _evict(self) -> None:
        """Give up the slot of the lowest priority where the budget is exceeded; the next token goes there."""
        layer, counts = self.layer, self.counts
        newest = cast(int, counts.seen)  # rules only compute with it
        scores = NO_SCORES if layer.scores is None else layer.scores
        worth = layer.rule.priority(scores, layer.position, newest, cast(int, layer.budget), layer.index)
        victim = lowest(worth, layer.position, 1)
        kept = layer.position.gather(-1, victim)
        layer.position.scatter_(-1, victim, torch.where(counts.over, EMPTY, kept))
        self.slot.copy_(torch.where(counts.over, victim, counts.newest + 1))

    def prepare(self) -> None:
        """Host: before a step, make room for a token behind the last one."""
        if not self.layer.n_free:
            self.slots.prepare()

    def count(self) -> bool:
        """Host: let the eager layer's counters follow one step; whether its slots have to be flushed then."""
        layer = self.layer
        if layer.n_free:
            layer.n_free -= 1
        else:
            self.slots.count()
        layer.kept += 1
        layer.seen += 1
        if layer.budget is not None and layer.kept > layer.budget:
            layer.n_free += 1
            layer.kept -= 1
            layer.evicted += 1
        if is_due := self.slots.flush_is_due:
            self.slots.count_flush()
        return is_due

    def tensors(self) -> list[Tensor]:
        """What a step changes for good, beside rows of slots that are not filled before it."""
        layer = self.layer
        own = [layer.free] if layer.rule.budget is None else [layer.free, layer.position]
        return own if layer.scores is None else [*own, layer.scores]

    def get_seq_length(self) -> int:
        """Tokens seen when the cache was captured: nothing may depend on it, positions are given."""
        return self.layer.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.kept + query_length, self.layer.seen - self.layer.kept

    def get_max_length(self) -> int:
        return -1


class DecodeStep:
    """One decode step of a cache, q = 1, with all that changes between steps on the device.

    `run` and `flush` queue work on the device and read nothing on the host that changes between steps: they are what
    a CUDA graph captures. The caller puts the token into `ids`, lets the host `prepare` the step, runs it, lets the
    host `count` it, and then runs the flushes that this names. States are the eager cache's, written in place by the
    model. The eager cache stays right all the time and can go on by itself afterwards.

    ids: int64 [B, 1]. seen: int64 [], its position.

    Raises CannotCapture where the model, the method or the store has no captured form, naming it.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.model, self.eager = model, cache
        logits = cache.last_logits
        self.ids = torch.zeros(logits.shape[0], 1, dtype=torch.int64, device=logits.device)
        self.seen = torch.full((), cache.seen, device=logits.device)
        groups: dict[object, Counts] = {}
        self.layers = [self._captured(layer, groups) for layer in cache.attention_layers]
        self.groups = list(groups.values())
        self.cache = Cache(layers=in_model_order(self.layers, cache.states))

    def _captured(self, layer: Layer, groups: dict[object, Counts]) -> "CapturedLayer | CapturedRagged":
        """The captured form of one layer; the first of those that count alike makes their counters."""
        kernel = layer.kernel
        if not isinstance(kernel, LengthsKernel):
            raise CannotCapture(f"the kernel {kernel.name} is told on the host how much is filled")
        if isinstance(layer, RaggedLayer):
            return CapturedRagged(layer, self.seen)
        slots = layer.slots.captured()
        most = slots.lengths[2] if layer.n_free else layer.capacity
        if layer.budget is not None and not layer.n_free:
            most = min(most, layer.budget + 1)
        start = Start(slots.lengths, most, layer.evicted, layer.budget)
        n_sink = layer.rule.sinks_in_place
        query = self.eager.last_logits.new_empty(0, dtype=self.model.dtype)
        if (reason := kernel.refuses_lengths(query, slots.key_parts(), slots.value_parts(), n_sink)) is not None:
            raise CannotCapture(reason)
        key = type(slots), start
        if key not in groups:
            groups[key] = slots.counts(start, self.seen)
        return CapturedLayer(layer, slots, groups[key], kernel)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """The step: logits [B, 1, V] of the token in `ids`."""
        for counts in self.groups:
            counts.begin()
        position = self.seen.expand_as(self.ids)
        with kvbench_attention(self.model):
            logits = forward(self.model, self.ids, self.cache, logits_to_keep=1, position_ids=position)
        for counts in self.groups:
            counts.end()
        self.seen.add_(1)
        return logits

    @torch.inference_mode()
    def flush(self, counts: Counts) -> None:
        """Quantise a full key residual in the layers of `counts`."""
        for layer in self.layers:
            if isinstance(layer, CapturedLayer) and layer.counts is counts:
                layer.slots.flush(counts)
        counts.flush()

    def prepare(self) -> None:
        """Host: before each step."""
        for layer in self.layers:
            layer.prepare()

    def count(self) -> list[Counts]:
        """Host: count one step that has run; the counters whose layers have to be flushed before the next one."""
        due: dict[int, Counts] = {}
        for layer in self.layers:
            if layer.count() and layer.counts is not None:
                due[id(layer.counts)] = layer.counts
        self.eager.positions_processed += 1
        return list(due.values())

    def tensors(self) -> list[Tensor]:
        """What a step changes for good, beside rows of slots that are not filled before it."""
        parts = [*self.groups, *self.layers, *self.eager.states]
        return [self.seen, *(tensor for part in parts for tensor in part.tensors())]
