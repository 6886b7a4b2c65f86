"""A layer whose KV heads keep different numbers of tokens: each holds blocks of one pool, as many as it needs."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.layer import CacheFull
from kvbench.cache.pool import Pool, blocks_for
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import EMPTY, NO_SCORES, KeepRule, lowest
from kvbench.cache.store import Buffer, SlotShape, Store
from kvbench.kernels import Kernel
from kvbench.kernels.parts import block_rows
from kvbench.kernels.prefill import Scoring


class RaggedLayer(CacheLayerMixin):
    """What `SlotLayer` is where all heads keep equally many tokens, with a length for each row and head.

    A forward of q tokens writes them, attends over everything kept plus itself, and then, where the budget is held,
    every head gives up as many as it got: each holds the number of tokens that the prompt left it. Memory follows:
    positions and scores lie in the rows of the pool as keys and values do.

    table: int32 [B, Hkv, n], the blocks of each head. lengths: int64 [B, Hkv], slots written; `longest` of them.
    position: int32 [rows of the pool], the token in each row. scores: float32 likewise, or None. free: int64
    [B, Hkv, step], a stack of `n_free` slots given up and not yet reused. room: slots that every head has left.
    """

    is_sliding = False

    def __init__(
        self,
        index: int,
        pool: Pool,
        table: Tensor,
        lengths: Tensor,
        rule: KeepRule,
        budget: int | None,
        room: int,
        step: int,
        seen: int,
        kernel: Kernel,
    ) -> None:
        super().__init__()
        self.index, self.pool, self.table, self.lengths = index, pool, table, lengths
        self.rule, self.budget, self.room, self.step, self.seen, self.kernel = rule, budget, room, step, seen, kernel
        self.longest, self.kept = int(lengths.max()), float(lengths.double().mean())
        self.position = torch.full((pool.rows,), EMPTY, dtype=torch.int32, device=table.device)
        self.scores: Tensor | None = None
        width = 0 if budget is None else step
        self.free = torch.zeros(*lengths.shape, width, dtype=torch.int64, device=table.device)
        self.n_free = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: blocks are allocated when the cache is built."""

    @property
    def evicted(self) -> float:
        """Tokens given up so far, the mean over heads."""
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
        """Write q new tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv], and hand on the layer itself.

        Raises CacheFull where they exceed what the cache was built for; nothing has changed then.
        """
        q = key.shape[2]
        self.check_room(q)
        reused = min(q, self.n_free)
        fresh = self.lengths.unsqueeze(-1) + torch.arange(q - reused, device=key.device)
        slot = torch.cat([self.free[..., self.n_free - reused : self.n_free], fresh], dim=-1)
        self.write(slot, key, value, torch.arange(self.seen, self.seen + q, dtype=torch.int32, device=key.device))
        self.n_free -= reused
        self.room -= q - reused
        self.lengths += q - reused
        self.longest += q - reused
        self.kept += q
        self.seen += q
        return self, value

    def write(self, slot: Tensor, key: Tensor, value: Tensor, position: Tensor) -> None:
        """Put tokens of positions int32 [q] into the slots [B, Hkv, q]; nothing is counted."""
        rows = self.pool.rows_of(self.table, slot)
        self.pool.write(rows, key, value)
        self.position.scatter_(0, rows.flatten(), position.expand(rows.shape).flatten())
        if self.scores is not None:
            new = self.scores.new_empty(rows.shape)
            new[:] = self.rule.fresh_scores(key, value)
            self.scores.scatter_(0, rows.flatten(), new.flatten())

    def check_room(self, q: int) -> None:
        """Raise CacheFull unless q more tokens fit in one forward."""
        if q > self.step:
            raise CacheFull(f"{q} tokens in one forward, of at most {self.step}; build the cache with max_step={q}")
        if q > self.n_free + self.room:
            raise CacheFull(
                f"the heads of layer {self.index} have room for {self.n_free + self.room} more tokens and got {q}; "
                f"build the cache with a larger max_new_tokens"
            )

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the q newest tokens over the slots, [B, Hq, q, Dv]; then eviction."""
        output = self.attended(query, scoring, self._visible(query.shape[2]))
        if self.budget is not None:
            count = query.shape[2]
            self.free[..., self.n_free : self.n_free + count] = self.given_up(count, self.seen - 1)
            self.n_free += count
            self.kept -= count
        return output

    def attended(self, query: Tensor, scoring: Scoring, visible: Tensor | None) -> Tensor:
        """The attention alone, and what it says about scores."""
        reads = self.scores is not None and self.rule.reads_attention
        where = self.table, self.lengths, self.longest
        output, probabilities = self.kernel.attend(
            self.pool.slots.turn_query(query),
            [self.pool.keys(*where)],
            [self.pool.values(*where)],
            scoring,
            visible=visible,
            want_probabilities=reads,
        )
        if reads and self.scores is not None and probabilities is not None:
            rows, written = self._rows()
            scores = self.rule.updated_scores(self.scores[rows], probabilities)
            # Slots that a head does not have share a row that is cut off again: which those are stays on the device.
            target, padded = rows.where(written, self.pool.rows), pad(self.scores, (0, 1))
            padded.scatter_(0, target.flatten(), scores.to(torch.float32).flatten())
            self.scores.copy_(padded[:-1])
        return self.pool.slots.turn_back(output)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """The pool's row of each slot, int64 [B, Hkv, longest], and which slots have been written, bool likewise."""
        rows = block_rows(self.table, self.pool.block_size)[..., : self.longest]
        return rows, torch.arange(self.longest, device=rows.device) < self.lengths.unsqueeze(-1)

    def positions(self) -> Tensor:
        """The token in each slot, EMPTY where there is none: int32 [B, Hkv, longest]."""
        rows, written = self._rows()
        return self.position[rows].masked_fill(~written, EMPTY)

    def _visible(self, q: int) -> Tensor | None:
        """Which slots each of the q newest tokens sees, [B, Hkv, q, longest]; None where all see all of a head."""
        if q == 1 and self.n_free == 0:
            return None
        position = self.positions().unsqueeze(-2)
        newest = torch.arange(self.seen - q, self.seen, device=position.device).view(q, 1)
        return (position != EMPTY) & (position <= newest)

    def given_up(self, count: int, newest: int) -> Tensor:
        """The slots [B, Hkv, count] that every head gives up, emptied, `newest` being the newest token's position."""
        assert self.budget is not None
        rows, _ = self._rows()
        position = self.positions()
        scores = NO_SCORES if self.scores is None else self.scores[rows]
        worth = self.rule.priority(scores, position, newest, self.budget, self.index)
        victims = lowest(worth, position, count)
        self.position.scatter_(0, rows.gather(-1, victims).flatten(), EMPTY)
        return victims

    def kept_positions(self) -> Tensor:
        """Positions of the kept tokens in ascending order, EMPTY behind a shorter head's: int64 [B, Hkv, longest]."""
        never = torch.iinfo(torch.int32).max
        position = self.positions()
        ordered = position.masked_fill(position == EMPTY, never).sort(-1).values
        return ordered.masked_fill(ordered == never, EMPTY).long()

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that this layer holds."""
        kept = round(self.kept * self.lengths.numel())
        yield from self.pool.buffers(kept)
        yield Buffer("positions", self.position, kept / self.pool.rows)
        for tensor in (self.free, self.table, self.lengths):
            yield Buffer("positions", tensor, 1.0)
        if self.scores is not None:
            yield Buffer("scores", self.scores, kept / self.pool.rows)

    def get_seq_length(self) -> int:
        """Tokens seen, not kept: it drives the position of the next token."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.longest + query_length, self.seen - self.longest

    def get_max_length(self) -> int:
        return -1


def ragged_layer(
    record: LayerRecord,
    rule: KeepRule,
    store: Store,
    budget: int,
    kept: Tensor,
    scores: Tensor | None,
    max_new_tokens: int,
    step: int,
    kernel: Kernel,
) -> RaggedLayer:
    """The layer of a prompt of which each head keeps a number of tokens of its own.

    Args:
        budget: the mean over heads. kept: bool [B, Hkv, T], from `keep_best_of_heads`. scores: float32 [B, Hkv, T].
    """
    batch, heads, prompt, key_dim = record.key.shape
    lengths = kept.sum(-1)
    room = min(max_new_tokens, step) if rule.holds_budget else max_new_tokens
    shape = SlotShape(batch, heads, key_dim, record.value.shape[-1], prompt, step, record.key.dtype, record.key.device)
    table = consecutive_blocks(lengths + room)
    pool = Pool(store, shape, heads=1, blocks=int(table.max()) + 1)
    layer = RaggedLayer(
        record.index, pool, table, lengths, rule, budget if rule.holds_budget else None, room, step, prompt, kernel
    )
    layer.fill(record.key, record.value, kept, scores if rule.holds_budget else None)
    return layer


def consecutive_blocks(tokens: Tensor) -> Tensor:
    """Blocks for tokens [B, Hkv], one head's after another's: int32 [B, Hkv, n]; short heads repeat their last."""
    counts = torch.tensor([[blocks_for(n) for n in row] for row in tokens.tolist()])
    last = counts.flatten().cumsum(0).view_as(counts) - 1
    first = last - counts + 1
    table = torch.minimum(first.unsqueeze(-1) + torch.arange(int(counts.max())), last.unsqueeze(-1))
    return table.to(device=tokens.device, dtype=torch.int32)
