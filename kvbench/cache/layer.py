"""One layer's compressed cache: slots in a store, a keep rule that says which of them to give up."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.mla import Latents
from kvbench.cache.rotary import RotateBack
from kvbench.cache.rule import EMPTY, NO_SCORES, KeepRule, lowest
from kvbench.cache.store import Buffer, Slots
from kvbench.kernels import Kernel
from kvbench.kernels.prefill import Scoring


class CacheFull(RuntimeError):
    """More tokens were fed than the cache was built for."""


class SlotLayer(CacheLayerMixin):
    """Holds kept tokens in slots, attends over them in place, then evicts down to `budget` (None: never).

    A forward of q tokens writes them (`update`), attends over everything kept plus itself (`attend`), and only then
    gives up what is over budget and lets the store quantise. All heads and batch rows keep equally many tokens.

    position: int32 [B, Hkv, S], the token in each slot, EMPTY where there is none; where a rule keeps everything
    slot i holds token i, and one row serves all heads. scores: float32 [B, Hkv, S] or None. free: int64
    [B, Hkv, step], a stack of `n_free` slots given up and not yet reused.
    kept, seen, evicted: tokens held, fed so far and given up so far.
    """

    is_sliding = False

    def __init__(
        self,
        index: int,
        slots: Slots,
        rule: KeepRule,
        budget: int | None,
        position: Tensor,
        scores: Tensor | None,
        step: int,
        rotate_back: RotateBack | None,
        kernel: Kernel,
        latents: Latents | None = None,
    ) -> None:
        super().__init__()
        slots.position = position
        self.index, self.slots, self.rule, self.budget = index, slots, rule, budget
        self.position, self.scores, self.step, self.rotate_back = position, scores, step, rotate_back
        self.kernel, self.latents = kernel, latents
        width = 0 if budget is None else step
        self.free = torch.zeros(*position.shape[:2], width, dtype=torch.int64, device=position.device)
        self.n_free = self.kept = self.seen = self.evicted = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: slots are allocated when the cache is built."""

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.position.shape[-1]

    @property
    def has_quantised(self) -> bool:
        """Whether a token is held in fewer bits than the model's."""
        return self.slots.has_quantised

    @property
    def has_compressed(self) -> bool:
        """Whether a token has been evicted or quantised."""
        return self.evicted > 0 or self.has_quantised

    def fill(self, key: Tensor, value: Tensor, position: Tensor, scores: Tensor | None, seen: int) -> None:
        """Take what a prefill left to keep: key [B, Hkv, n, D], value, position [B, Hkv, n], scores [B, Hkv, n]."""
        n = key.shape[2]
        if self.rule.budget is not None:
            self.position[..., :n] = position
        self.slots.fill(key, value)
        if self.scores is not None and scores is not None:
            self.scores[..., :n] = scores
        self.kept, self.seen, self.evicted = n, seen, seen - n
        self.slots.settle()

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["SlotLayer", "SlotLayer"]:
        """Write q new tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv], and hand on the layer itself.

        Raises CacheFull where they exceed what the cache was built for; nothing has changed then.
        """
        key, value = self.entries(key, value)
        q = key.shape[2]
        self.check_room(q)
        reused = min(q, self.n_free)
        if reused:
            slot = self.free[..., self.n_free - reused : self.n_free]
            self.position.scatter_(-1, slot, self._new_positions(0, reused).expand_as(slot))
            self.slots.overwrite(slot, key[:, :, :reused], value[:, :, :reused])
            if self.scores is not None:
                fresh = self.scores.new_empty(slot.shape)
                fresh[:] = self.rule.fresh_scores(key[:, :, :reused])
                self.scores.scatter_(-1, slot, fresh)
        if reused < q:
            new = slice(self.slots.length, self.slots.length + q - reused)
            if self.rule.budget is not None:
                self.position[..., new] = self._new_positions(reused, q)
            self.slots.append(key[:, :, reused:], value[:, :, reused:])
            if self.scores is not None:
                self.scores[..., new] = self.rule.fresh_scores(key[:, :, reused:])
        self.n_free -= reused
        self.kept += q
        self.seen += q
        return self, self

    def entries(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the model hands `update`, as the slots take it: with latent attention see `Latents.entries`."""
        return (key, value) if self.latents is None else self.latents.entries(key, value)

    def check_room(self, q: int) -> None:
        """Raise CacheFull unless q more tokens fit in one forward."""
        if q > self.step:
            raise CacheFull(f"{q} tokens in one forward, of at most {self.step}; build the cache with max_step={q}")
        if self.kept + q > self.capacity:
            raise CacheFull(
                f"layer {self.index} holds {self.kept} tokens of at most {self.capacity} and got {q} more; "
                f"build the cache with a larger max_new_tokens"
            )

    def _new_positions(self, first: int, stop: int) -> Tensor:
        return torch.arange(self.seen + first, self.seen + stop, dtype=torch.int32, device=self.position.device)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the q newest tokens over the slots, [B, Hq, q, Dv]; then eviction and quantisation."""
        n_sink = self.rule.sinks_in_place if self.evicted else 0
        sink_query = self.rotate_back(query, self.evicted) if n_sink and self.rotate_back else None
        reads = self.scores is not None and self.rule.reads_attention
        output, probabilities = self.kernel.attend(
            self.slots.turn_query(query),
            self.slots.key_parts(),
            self.slots.value_parts(),
            scoring,
            visible=self._visible(query.shape[2], scoring),
            sink_query=None if sink_query is None else self.slots.turn_query(sink_query),
            n_sink=n_sink,
            want_probabilities=reads,
        )
        if self.scores is not None and probabilities is not None and reads:
            used = self.scores[..., : self.slots.length]
            used.copy_(self.rule.updated_scores(used, shared_by_heads(probabilities, used.shape[1])))
        self._evict()
        self.slots.settle()
        return self.slots.turn_back(output)

    def _visible(self, q: int, scoring: Scoring) -> Tensor | None:
        """Which slots each of the q newest tokens sees, [B, Hkv, q, S]; None where all see all."""
        if q == 1 and scoring.window is None and self.kept == self.slots.length:
            return None
        position = self.position[..., None, : self.slots.length]
        newest = torch.arange(self.seen - q, self.seen, device=position.device).view(q, 1)
        visible = (position != EMPTY) & (position <= newest)
        return visible if scoring.window is None else visible & (position >= scoring.first_seen(newest))

    def _evict(self) -> None:
        if self.budget is None or self.kept <= self.budget:
            return
        count = self.kept - self.budget
        position = self.position[..., : self.slots.length]
        scores = NO_SCORES if self.scores is None else self.scores[..., : self.slots.length]
        worth = self.rule.priority(scores, position, self.seen - 1, self.budget, self.index)
        victims = lowest(worth, position, count)
        self.position.scatter_(-1, victims, EMPTY)
        self.free[..., self.n_free : self.n_free + count] = victims
        self.n_free += count
        self.kept -= count
        self.evicted += count

    def positions(self) -> Tensor:
        """The token in each slot written so far, EMPTY where there is none: int32 [B, Hkv, n]."""
        return self.position[..., : self.slots.length]

    def kept_positions(self) -> Tensor:
        """Positions of the kept tokens in ascending order: int64 [B, Hkv, kept]."""
        never = torch.iinfo(torch.int32).max
        position = self.position[..., : self.slots.length]
        ordered = position.masked_fill(position == EMPTY, never).sort(-1).values
        return ordered[..., : self.kept].long()

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that this layer holds."""
        yield from self.slots.buffers(self.kept)
        yield Buffer("positions", self.position, self.kept / self.capacity)
        yield Buffer("positions", self.free, 1.0)
        if self.scores is not None:
            yield Buffer("scores", self.scores, self.kept / self.capacity)

    def get_seq_length(self) -> int:
        """Tokens seen, not kept: it drives the position of the next token."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.kept + query_length, self.seen - self.kept

    def get_max_length(self) -> int:
        return -1


def shared_by_heads(probabilities: Tensor, heads: int) -> Tensor:
    """[B, Hkv, Hq / Hkv, q, S] for that many KV heads: those made of shared latents have keys of their own, and the
    decision is one for all."""
    shared: Tensor = probabilities.flatten(1, 2).unflatten(1, (heads, -1))
    return shared
