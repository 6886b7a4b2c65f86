"""One layer's compressed cache: slots in a store, and a keep rule that decides which tokens to evict."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.counters import Counters
from kvbench.cache.held import held_in_slots, push_queries
from kvbench.cache.layer_base import EngineLayer
from kvbench.cache.merge import Evicted, changed_slots, only_where
from kvbench.cache.plan import LayerPlan
from kvbench.cache.ranking import EMPTY, ascending, first_evicted, lowest
from kvbench.cache.rule import NO_SCORES
from kvbench.cache.slots import Buffer, Slots
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Part
from kvbench.kernels.prefill import Scoring


@dataclass(frozen=True)
class SlotView:
    """What one forward attends over: the first `slots` slots of a layer.

    attend: the kernel's function. visible: bool [B, Hkv, q, S], which slots each token sees; None: all see all.
    evicted: tokens evicted so far, a number or int64 []; None where the rule counts no positions inside the cache.
    lengths: see `AttendOptions`; given where the parts span whole buffers.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None]]
    keys: Sequence[Part]
    values: Sequence[Part]
    slots: int
    visible: Tensor | None
    evicted: int | Tensor | None
    lengths: Tensor | None = None


class SlotLayer(EngineLayer):
    """Keeps tokens in slots, attends over them in place, then evicts down to `evicts_to` tokens (None: never).

    A forward of q tokens writes them (`update`) and attends over all kept tokens and itself (`attend`). Only then are
    tokens evicted and the store quantises. All heads and batch rows keep equally many tokens.

    position: int32 [B, Hkv, S], the token in each slot, EMPTY where there is none. Where the rule keeps every token,
    slot i holds token i and one row serves all heads. scores: float32 [B, Hkv, S] or None. queries: the newest ones,
    [B, Hq, w, D], where the rule scores anew by them; else None. free: int64 [B, Hkv, n], a stack of slots whose tokens
    were evicted and that are not reused yet; `counters.free` of them.
    carried: what a rule that merges carries from one decision to the next; None where the rule does not merge.
    """

    def __init__(
        self,
        plan: LayerPlan,
        slots: Slots,
        position: Tensor,
        scores: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> None:
        super().__init__(Counters(position.shape[-1], plan.step, plan.evicts_to, evicts_every=plan.rule.evicts_every))
        slots.position = position
        self.plan, self.slots, self.position, self.scores = plan, slots, position, scores
        self.index, self.rule, self.kernel, self.latents = plan.index, plan.rule, plan.kernel, plan.latents
        self.rotate_back, self.queries = plan.rotate_back, queries
        self.n_sink = 0 if plan.rotate_back is None else plan.rule.sinks_in_place
        self.free = free_slots(position.shape[:2], plan, position.device)
        self.carried: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.counters.capacity

    @property
    def evicts_to(self) -> int | None:
        """Tokens kept between steps; None where the layer never evicts."""
        return self.counters.evicts_to

    @property
    def kept(self) -> int:
        """Tokens held per KV head now."""
        return self.counters.kept

    @property
    def evicted(self) -> int:
        """Tokens evicted so far."""
        return self.counters.evicted

    @property
    def has_quantised(self) -> bool:
        """Whether a token is held in fewer bits than the model's."""
        return self.slots.has_quantised

    @property
    def has_compressed(self) -> bool:
        """Whether a token has been evicted or quantised."""
        return self.evicted > 0 or self.has_quantised

    def fill(self, key: Tensor, value: Tensor, position: Tensor, scores: Tensor | None, seen: int) -> None:
        """Take kept tokens of a prompt: key [B, Hkv, n, D], value, position [B, Hkv, n], scores [B, Hkv, n].

        They go behind those held, where the prompt is read in chunks. seen: tokens of the prompt so far.
        """
        behind = slice(self.counters.written, self.counters.written + key.shape[2])
        if self.plan.has_positions:
            self.position[..., behind] = position
        self.slots.fill(key, value)
        if self.scores is not None and scores is not None:
            self.scores[..., behind] = scores
        self.counters.fill(behind.stop, seen)
        self.slots.settle()

    def adopt(self, kept: int, seen: int) -> None:
        """Take note that the first `kept` slots hold tokens already, of a prompt of `seen` tokens."""
        self.counters.fill(kept, seen)

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["SlotLayer", "SlotLayer"]:
        """Write q new tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv], and return the layer itself twice.

        Raises CacheFull where they exceed what the cache was built for; nothing has changed then.
        """
        key, value = self.keys_and_values(key, value)
        q, start, counters = key.shape[2], self.seen, self.counters
        self.check_room(q)
        top, written = counters.free, counters.written
        reused = counters.accept(q)
        if reused:
            slot = self.free[..., top - reused : top]
            position = self._new_positions(start, start + reused)
            self.put(slot, position, key[:, :, :reused], value[:, :, :reused], self.slots.overwrite)
        if reused < q:
            behind = slice(written, counters.written)
            if self.plan.has_positions:
                self.position[..., behind] = self._new_positions(start + reused, start + q)
            self.slots.append(key[:, :, reused:], value[:, :, reused:])
            if self.scores is not None:
                self.scores[..., behind] = self.rule.fresh_scores(key[:, :, reused:], value[:, :, reused:])
        return self, self

    def _new_positions(self, first: int, stop: int) -> Tensor:
        return torch.arange(first, stop, dtype=torch.int32, device=self.position.device)

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the slots hold them; with latent attention the model hands on latents instead."""
        return (key, value) if self.latents is None else self.latents.keys_and_values(key, value)

    def put(
        self,
        slot: Tensor,
        position: Tensor,
        key: Tensor,
        value: Tensor,
        write: Callable[[Tensor, Tensor, Tensor], None],
    ) -> None:
        """Write q tokens of positions int32 [q] to the slots [B, Hkv, q] by `write`; nothing is counted."""
        if self.plan.has_positions:
            self.position.scatter_(-1, slot, position.expand_as(slot))
        write(slot, key, value)
        if self.scores is not None:
            fresh = self.scores.new_empty(slot.shape)
            fresh[:] = self.rule.fresh_scores(key, value)
            self.scores.scatter_(-1, slot, fresh)

    def check_room(self, q: int) -> None:
        """Raise CacheFull unless q more tokens fit in one forward."""
        self.counters.check_room(q, self.index)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the q newest tokens over the slots, [B, Hq, q, Dv]; then eviction and quantisation."""
        written = self.counters.written
        visible = self._visible(query.shape[2], scoring)
        keys, values = self.slots.key_parts(), self.slots.value_parts()
        view = SlotView(self.kernel.attend, keys, values, written, visible, self.evicted or None)
        output = self.attended(query, scoring, view, self.scores is not None and self.rule.reads_attention)
        push_queries(self.queries, query, self.latents)
        if count := self.counters.excess:
            victims = self.victims(written, self.seen - 1, count)
            if self.carried is not None:
                self.merge(victims, keys, values, victims)
            self.position.scatter_(-1, victims, EMPTY)
            push(self.free, self.counters, victims)
        self.slots.settle()
        return output

    def attended(self, query: Tensor, scoring: Scoring, view: SlotView, reads: bool) -> Tensor:
        """The attention alone, [B, Hq, q, Dv]; where it `reads` probabilities, the rule's scores are updated."""
        sink_query = None
        if self.n_sink and view.evicted is not None and self.rotate_back is not None:
            sink_query = self.slots.transform_query(self.rotate_back(query, view.evicted))
        n_sink = 0 if sink_query is None else self.n_sink
        options = AttendOptions(view.visible, sink_query, n_sink, reads, view.lengths)
        query = self.slots.transform_query(query)
        output, probabilities = view.attend(query, view.keys, view.values, scoring, options)
        if self.scores is not None and probabilities is not None and reads:
            used = self.scores[..., : view.slots]
            shared = shared_by_heads(probabilities[..., : view.slots], used.shape[1])
            used.copy_(self.rule.updated_scores(used, shared))
        return self.slots.restore_output(output)

    def victims(self, slots: int, newest: int, count: int) -> Tensor:
        """Of the first `slots` slots those with the lowest priorities, [B, Hkv, count]; newest: the newest position."""
        assert self.plan.budget is not None
        position = self.position[..., :slots]
        if self.scores is not None and self.rule.rescores:
            return self._victims_by_new_scores(position, self.scores[..., :slots], newest, count)
        scores = NO_SCORES if self.scores is None else self.scores[..., :slots]
        priority = self.rule.priority(scores, position, newest, self.plan.budget, self.index)
        return lowest(priority, position, count)

    def merge(
        self, victims: Tensor, keys: Sequence[Part], values: Sequence[Part], unused: Tensor, over: Tensor | None = None
    ) -> None:
        """Merge the tokens in the slots `victims` [B, Hkv, c] into kept ones, as the rule says.

        unused: slots [B, Hkv, c] that hold nothing from now on. over: bool [], merge only if it is.
        """
        assert self.carried is not None
        key, value = self.slots.read(keys, values)
        position = self.position[..., : key.shape[2]]
        stays = (position != EMPTY).scatter(-1, victims, False)
        scores = None if self.scores is None else self.scores[..., : key.shape[2]]
        evicted = Evicted(key, value, position, stays, scores, victims, self.index, self.carried)
        merge = self.rule.merge(evicted)
        merge = merge if over is None else only_where(merge, over, self.carried)
        self.slots.overwrite(*changed_slots(evicted, merge, unused))
        if merge.carried is not None:
            self.carried.copy_(merge.carried)

    def _victims_by_new_scores(self, position: Tensor, scores: Tensor, newest: int, count: int) -> Tensor:
        """`victims` of a rule that scores all tokens anew; their scores are kept."""
        plan = self.plan
        assert plan.budget is not None and plan.scoring is not None
        kept = plan.budget + count
        held, slot = held_in_slots(
            self.slots, position, scores, kept, newest + 1, self.queries, plan.scoring, plan.rotate_back
        )
        new = self.rule.scores_at_eviction(held).to(scores.dtype)
        scores.scatter_(-1, slot, new)
        priority = self.rule.priority(new, held.position, newest, plan.budget, self.index)
        return slot.gather(-1, first_evicted(priority, count))

    def _visible(self, q: int, scoring: Scoring) -> Tensor | None:
        """Which slots each of the q newest tokens sees, [B, Hkv, q, S]; None where all see all."""
        if q == 1 and scoring.window is None and self.counters.free == 0:
            return None
        position = self.positions()[..., None, :]
        newest = torch.arange(self.seen - q, self.seen, device=position.device).view(q, 1)
        visible = (position != EMPTY) & (position <= newest)
        return visible if scoring.window is None else visible & (position >= scoring.first_seen(newest))

    def positions(self) -> Tensor:
        """The token in each slot written so far, EMPTY where there is none: int32 [B, Hkv, n]."""
        return self.position[..., : self.counters.written]

    def kept_positions(self) -> Tensor:
        """Positions of the kept tokens in ascending order: int64 [B, Hkv, kept]."""
        return ascending(self.positions())[..., : self.kept]

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that this layer holds."""
        yield from self.slots.buffers(self.kept)
        yield Buffer("positions", self.position, self.kept / self.capacity)
        yield Buffer("positions", self.free, 1.0)
        if self.carried is not None and self.carried.numel():
            yield Buffer("scores", self.carried, 1.0)
        if self.scores is not None:
            yield Buffer("scores", self.scores, self.kept / self.capacity)
        if self.queries is not None:
            yield Buffer("queries", self.queries, 1.0)


def free_slots(lead: tuple[int, ...], plan: LayerPlan, device: torch.device) -> Tensor:
    """An empty stack of free slots, int64 [B, Hkv, n]; without width where the layer never evicts."""
    return torch.zeros(*lead, plan.most_evicted, dtype=torch.int64, device=device)


def push(free: Tensor, counters: Counters, victims: Tensor) -> None:
    """Put the slots `victims` [B, Hkv, n] on the stack of free slots and count the eviction."""
    count = victims.shape[-1]
    free[..., counters.free : counters.free + count] = victims
    counters.evict(count)


def shared_by_heads(probabilities: Tensor, heads: int) -> Tensor:
    """Probabilities [B, Hkv, Hq / Hkv, q, S] for `heads` KV heads.

    Where latents are expanded, each query head has keys of its own and all heads share one decision.
    """
    shared: Tensor = probabilities.flatten(1, 2).unflatten(1, (heads, -1))
    return shared
