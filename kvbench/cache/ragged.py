"""A layer whose KV heads keep different numbers of tokens: each head holds as many blocks of one pool as it needs."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.cache.counters import CacheFull, Counters
from kvbench.cache.layer import free_slots, push
from kvbench.cache.layer_base import EngineLayer
from kvbench.cache.plan import LayerPlan
from kvbench.cache.pool import Pool, blocks_for
from kvbench.cache.ranking import EMPTY, ascending, lowest
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import NO_SCORES
from kvbench.cache.selection import Selection
from kvbench.cache.slots import Buffer
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import block_rows
from kvbench.kernels.prefill import Scoring


class RaggedLayer(EngineLayer):
    """A `SlotLayer` in which each batch row and head has a length of its own.

    A forward of q tokens writes them and attends over all kept tokens and itself. Then, where the layer evicts, every
    head evicts q tokens: each keeps as many tokens as it kept of the prompt, except heads that keep every new token
    (`grows`, bool [Hkv]; None: no head does). Positions and scores lie in the rows of the pool, as keys and values do.
    `counters` are those of the longest head that evicts, or of the longest head where none does.

    table: int32 [B, Hkv, n], the blocks of each head. lengths: int64 [B, Hkv], slots written. position: int32 [rows of
    the pool], the token in each row. scores: float32 [rows of the pool] or None. free: int64 [B, Hkv, step], a stack of
    slots whose tokens were evicted and that are not reused yet; `counters.free` of them.
    """

    def __init__(self, plan: LayerPlan, pool: Pool, table: Tensor, lengths: Tensor, prompt: int) -> None:
        self.grows, self.prompt = growing_heads(plan), prompt
        grows = torch.zeros_like(lengths[0], dtype=torch.bool) if self.grows is None else self.grows
        self.evicts = plan.evicts_to is not None and not bool(grows.all())
        self.longest_growing = int(lengths.masked_fill(~grows, 0).max())
        longest = int(lengths.masked_fill(grows & self.evicts, 0).max())
        room = plan.room if self.evicts else plan.max_new_tokens
        super().__init__(Counters(longest + room, plan.step, longest if self.evicts else None))
        self.counters.fill(longest, prompt)
        self.plan, self.pool, self.table, self.lengths = plan, pool, table, lengths
        self.index, self.rule, self.kernel = plan.index, plan.rule, plan.kernel
        self.prompt_longest, self.prompt_kept = longest, float(lengths.double().mean())
        self.position = torch.full((pool.rows,), EMPTY, dtype=torch.int32, device=table.device)
        self.share_growing = float(grows.double().mean())
        self.scores: Tensor | None = None
        self.free = free_slots(lengths.shape, plan, table.device)

    @property
    def evicts_to(self) -> int | None:
        """Tokens kept between steps, the mean over heads; None where the layer never evicts."""
        return self.plan.evicts_to if self.evicts else None

    @property
    def kept(self) -> float:
        """Tokens held now, the mean over heads."""
        added = self.counters.kept - self.prompt_longest
        return self.prompt_kept + added + self.share_growing * (self.seen - self.prompt - added)

    @property
    def written(self) -> int:
        """Slots of the longest head that have been written."""
        growing = self.longest_growing + self.seen - self.prompt if self.longest_growing else 0
        return max(self.counters.written, growing)

    @property
    def evicted(self) -> float:
        """Tokens evicted so far, the mean over heads."""
        return self.seen - self.kept

    @property
    def has_quantised(self) -> bool:
        """Whether a token is held in fewer bits than the model's."""
        return self.pool.slots.has_quantised

    @property
    def has_compressed(self) -> bool:
        """Whether a token has been evicted or quantised."""
        return self.kept < self.seen or self.has_quantised

    def fill(self, key: Tensor, value: Tensor, kept: Tensor, scores: Tensor | None) -> None:
        """Take the prompt's tokens where kept, bool [B, Hkv, T]; key [B, Hkv, T, D], value, scores [B, Hkv, T]."""
        row, head, position = kept.nonzero(as_tuple=True)
        slot = (kept.cumsum(-1) - 1)[kept]
        n = self.pool.block_size
        rows = self.table[row, head, slot // n].long() * n + slot % n
        key_rows, value_rows = key[kept][None, None], value[kept][None, None]
        self.pool.fit(key_rows, value_rows)
        self.pool.write(rows[None, None], key_rows, value_rows)
        self.position[rows] = position.to(torch.int32)
        if scores is not None:
            self.scores = torch.zeros(self.pool.rows, device=key.device)
            self.scores[rows] = scores[kept]

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["RaggedLayer", Tensor]:
        """Write q new tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv], and return the layer itself in place of keys.

        Raises CacheFull where they exceed what the cache was built for; nothing has changed then.
        """
        q, start, top = key.shape[2], self.seen, self.counters.free
        self.check_room(q)
        reused = self.counters.accept(q)
        behind = self.lengths.unsqueeze(-1) + torch.arange(q, device=key.device)
        slot = torch.cat([self.free[..., top - reused : top], behind[..., : q - reused]], dim=-1)
        if self.grows is not None:
            slot = torch.where(self.grows[:, None], behind, slot)
        self.put(slot, torch.arange(start, start + q, dtype=torch.int32, device=key.device), key, value)
        self.lengths += q - reused if self.grows is None else torch.where(self.grows, q, q - reused)
        return self, value

    def put(self, slot: Tensor, position: Tensor, key: Tensor, value: Tensor) -> None:
        """Write tokens of positions int32 [q] to the slots [B, Hkv, q]; nothing is counted."""
        rows = self.pool.rows_of(self.table, slot)
        self.pool.write(rows, key, value)
        self.position.scatter_(0, rows.flatten(), position.expand(rows.shape).flatten())
        if self.scores is not None:
            new = self.scores.new_empty(rows.shape)
            new[:] = self.rule.fresh_scores(key, value)
            self.scores.scatter_(0, rows.flatten(), new.flatten())

    def check_room(self, q: int) -> None:
        """Raise CacheFull unless q more tokens fit in one forward."""
        self.counters.check_room(q, self.index)
        if self.longest_growing and self.seen + q > self.prompt + self.plan.max_new_tokens:
            raise CacheFull(
                f"layer {self.index} was built for {self.plan.max_new_tokens} tokens after its prompt; "
                "build the cache with a larger max_new_tokens"
            )

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the q newest tokens over the slots, [B, Hq, q, Dv]; then eviction."""
        slots = self.written
        output = self.attended(query, scoring, slots, self._visible(query.shape[2]))
        if count := self.counters.excess:
            push(self.free, self.counters, self.victims(slots, self.seen - 1, count))
        return output

    def attended(self, query: Tensor, scoring: Scoring, slots: int, visible: Tensor | None) -> Tensor:
        """The attention alone, over the first `slots` slots of each head; the rule's scores are updated."""
        reads = self.scores is not None and self.rule.reads_attention
        where = self.table, self.lengths, slots
        output, probabilities = self.kernel.attend(
            self.pool.slots.transform_query(query),
            [self.pool.keys(*where)],
            [self.pool.values(*where)],
            scoring,
            AttendOptions(visible, want_probabilities=reads),
        )
        if reads and self.scores is not None and probabilities is not None:
            rows, written = self._rows(slots)
            scores = self.rule.updated_scores(self.scores[rows], probabilities)
            # Slots that a head does not have go to an additional row that is cut off again: no copy to the host.
            target, padded = rows.where(written, self.pool.rows), pad(self.scores, (0, 1))
            padded.scatter_(0, target.flatten(), scores.to(torch.float32).flatten())
            self.scores.copy_(padded[:-1])
        return self.pool.slots.restore_output(output)

    def _rows(self, slots: int) -> tuple[Tensor, Tensor]:
        """The pool's row of each slot, int64 [B, Hkv, slots], and which slots have been written, bool likewise."""
        rows = block_rows(self.table, self.pool.block_size)[..., :slots]
        return rows, torch.arange(slots, device=rows.device) < self.lengths.unsqueeze(-1)

    def positions(self, slots: int | None = None) -> Tensor:
        """The token in each of the first slots (None: of the longest head's), EMPTY where there is none: int32
        [B, Hkv, slots]."""
        rows, written = self._rows(self.written if slots is None else slots)
        return self.position[rows].masked_fill(~written, EMPTY)

    def _visible(self, q: int) -> Tensor | None:
        """Which slots each of the q newest tokens sees, [B, Hkv, q, longest]; None where all see all of a head."""
        if q == 1 and self.counters.free == 0:
            return None
        position = self.positions().unsqueeze(-2)
        newest = torch.arange(self.seen - q, self.seen, device=position.device).view(q, 1)
        return (position != EMPTY) & (position <= newest)

    def victims(self, slots: int, newest: int, count: int) -> Tensor:
        """Empty the slots with the lowest priorities, `count` of each head that evicts; returns them [B, Hkv, count].

        What is returned for a head that keeps every token has no meaning. slots: how many of each head's slots are
        looked at. newest: the newest token's position.
        """
        assert self.plan.budget is not None
        rows, _ = self._rows(slots)
        position = self.positions(slots)
        scores = NO_SCORES if self.scores is None else self.scores[rows]
        priority = self.rule.priority(scores, position, newest, self.plan.budget, self.index)
        found = lowest(priority, position, count)
        emptied = torch.full_like(found, EMPTY, dtype=torch.int32)
        if self.grows is not None:
            emptied = torch.where(self.grows[:, None], position.gather(-1, found), emptied)
        self.position.scatter_(0, rows.gather(-1, found).flatten(), emptied.flatten())
        return found

    def kept_positions(self) -> Tensor:
        """Positions of the kept tokens in ascending order, EMPTY behind a shorter head's: int64 [B, Hkv, longest]."""
        return ascending(self.positions())

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that this layer holds."""
        kept = round(self.kept * self.lengths.numel())
        yield from self.pool.buffers(kept)
        yield Buffer("positions", self.position, kept / self.pool.rows)
        for tensor in (self.free, self.table, self.lengths):
            yield Buffer("positions", tensor, 1.0)
        if self.grows is not None:
            yield Buffer("positions", self.grows, 1.0)
        if self.scores is not None:
            yield Buffer("scores", self.scores, kept / self.pool.rows)


def ragged_layer(record: LayerRecord, plan: LayerPlan, selection: Selection) -> RaggedLayer:
    """The layer of a prompt of which each head keeps a number of tokens of its own; copies from the record."""
    lengths, prompt = selection.kept.sum(-1), record.key.shape[2]
    grows = growing_heads(plan)
    room = plan.room if grows is None else torch.where(grows, plan.max_new_tokens, plan.room)
    table = consecutive_blocks(lengths + room)
    pool = Pool(plan.store, plan.shape(record, prompt), heads=1, blocks=int(table.max()) + 1)
    layer = RaggedLayer(plan, pool, table, lengths, prompt)
    layer.fill(record.key, record.value, selection.kept, None if plan.evicts_to is None else selection.scores)
    return layer


def growing_heads(plan: LayerPlan) -> Tensor | None:
    """Which heads keep every new token although the rule evicts: bool [Hkv]; None: no head does."""
    return None if plan.evicts_to is None else plan.rule.growing_heads()


def consecutive_blocks(tokens: Tensor) -> Tensor:
    """Blocks for tokens [B, Hkv], one head's after another's: int32 [B, Hkv, n]; short heads repeat their last."""
    counts = torch.tensor([[blocks_for(n) for n in row] for row in tokens.tolist()])
    last = counts.flatten().cumsum(0).view_as(counts) - 1
    first = last - counts + 1
    table = torch.minimum(first.unsqueeze(-1) + torch.arange(int(counts.max())), last.unsqueeze(-1))
    return table.to(device=tokens.device, dtype=torch.int32)
