"""One layer of a cache by masks: no token ever moves, evicted ones are hidden, and attention is one matrix in float64.

What the engine does with slots, free lists, overwritten codes and kernels has no counterpart here. The rule's own
scores come from its hooks, which the tests of each method hold against loops; stores of a known kind are read by
`tests.shared.reference`, others by a store that only ever appends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.hadamard import hadamard
from kvbench.cache.held import HeldTokens
from kvbench.cache.merge import Evicted
from kvbench.cache.observe import RecentQueries
from kvbench.cache.rotary import RotateBack
from kvbench.cache.rule import NO_SCORES, KeepRule
from kvbench.cache.store import DenseStore, SlotShape, Store
from kvbench.kernels.parts import read_all
from kvbench.kernels.prefill import Scoring
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from tests.shared.reference import along_channels, along_tokens, rotate


@dataclass
class Tokens:
    """A layer's queries, keys and values of all tokens, in the engine's dtype: [B, heads, n, D]; raw: un-rotated."""

    raw_query: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class Reading:
    """What attention reads kept tokens as: keys and values of the rows so far, float64, and the query that fits."""

    def __init__(self, store: Store, shape: SlotShape, key: Tensor, value: Tensor) -> None:
        self.store, self.settled = store, key.shape[2]
        self.key, self.value = key, value
        self.known = type(store) in (DenseStore, PerToken) or (type(store) is Kivi and is_plain(store))
        if isinstance(store, PerToken) and store.rotate and key.dtype != torch.float64:
            self.known = False  # a product in float32 depends on how many rows it has, and a last bit may turn a code
        self.twin = None if self.known else store.allocate(shape)
        if self.twin is not None:
            self.twin.fill(key, value)
            self.twin.settle()

    def append(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        if self.twin is not None:
            self.twin.append(key, value)

    def replace(self, b: int, h: int, row: int, key: Tensor, value: Tensor) -> None:
        """Write one token's key [D] and value [Dv] anew."""
        self.key[b, h, row], self.value[b, h, row] = key.to(self.key.dtype), value.to(self.value.dtype)
        if self.twin is not None:
            slot = torch.full((*self.key.shape[:2], 1), row)
            self.twin.overwrite(slot, self.key[:, :, [row]], self.value[:, :, [row]])

    def settle(self) -> None:
        self.settled = self.key.shape[2]
        if self.twin is not None:
            self.twin.settle()

    def turned(self, query: Tensor) -> Tensor:
        return query if self.twin is None else self.twin.transform_query(query)

    def back(self, output: Tensor) -> Tensor:
        return output if self.twin is None else self.twin.restore_output(output)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the model's basis, in the dtype that the engine merges in."""
        key, value = self.rows()
        if self.twin is not None:
            key, value = self.back(key), self.back(value)
        wide = torch.promote_types(self.key.dtype, torch.float32)
        return key.to(wide), value.to(wide)

    def in_model_basis(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows so far, as the model made them but for what the store loses: float32."""
        key, value = (x.float() for x in self.rows())
        return (key, value) if self.twin is None else (self.twin.restore_keys(key), self.twin.restore_output(value))

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, n, D], as `turned` queries and `back` outputs expect them."""
        store = self.store
        if self.twin is not None:
            parts = self.twin.key_parts(), self.twin.value_parts()
            return read_all(parts[0], torch.float64), read_all(parts[1], torch.float64)
        if isinstance(store, DenseStore):
            dtype = self.key.dtype if store.dtype is None else getattr(torch, store.dtype)
            return self.key.to(dtype).double(), self.value.to(dtype).double()
        if isinstance(store, PerToken):
            turn = hadamard if store.rotate else lambda x: x
            pairs = (self.key, store.k_bits), (self.value, store.v_bits)
            key, value = (turn(along_channels(turn(x), bits, store.group_size)) for x, bits in pairs)
            return key, value
        assert isinstance(store, Kivi)
        r, key, value = store.residual_length, self.key.double(), self.value.double()
        k, v = self.settled - self.settled % r, max(0, self.settled - r)
        if k:
            key = torch.cat([along_tokens(self.key[:, :, :k], store.k_bits, store.group_size), key[:, :, k:]], 2)
        if v:
            value = torch.cat(
                [along_channels(self.value[:, :, :v], store.v_bits, store.group_size), value[:, :, v:]], 2
            )
        return key, value


def is_plain(store: Kivi) -> bool:
    """Whether the axes are the paper's."""
    axes = getattr(store, "k_axis", "token"), getattr(store, "v_axis", "channel")
    return axes == ("token", "channel")


class SlowLayer:
    """The layer after its prompt, [B, Hkv, m] rows: `position`, `alive`, `scores`.

    kept: the prompt's positions that stay, [B, Hkv, m]. tolerance: how near two priorities count as equal. carried:
    what a rule that merges carries over from the prompt.
    """

    def __init__(
        self,
        rule: KeepRule,
        reading: Reading,
        kept: Tensor,
        scores: Tensor | None,
        budget: int | None,
        layer: int,
        scoring: Scoring,
        theta: float,
        prompt: int,
        tolerance: float,
        rotation: RotateBack | None = None,
        carried: Tensor | None = None,
    ) -> None:
        self.rotation = rotation
        self.rule, self.reading, self.budget, self.layer, self.scoring = rule, reading, budget, layer, scoring
        self.position, self.alive, self.scores = kept, torch.ones_like(kept, dtype=torch.bool), scores
        self.theta, self.seen, self.tolerance = theta, prompt, tolerance
        self.carried = torch.full((*kept.shape[:2], rule.carries), torch.nan) if carried is None else carried

    def step(self, tokens: Tokens, q: int, engine_kept: object) -> tuple[Tensor, str | None]:
        """Attention of the next q tokens, [B, Hq, q, D], then the rule's decision, held against what the engine kept.

        Returns the output and what is wrong with the engine's decision, if anything is.
        """
        rows = slice(self.seen, self.seen + q)
        key, value = tokens.key[:, :, rows], tokens.value[:, :, rows]
        evicted = self.seen - int(self.alive[0, 0].sum())
        self.reading.append(key, value)
        new = torch.arange(rows.start, rows.stop).expand(*key.shape[:2], q)
        self.position = torch.cat([self.position, new], -1)
        self.alive = torch.cat([self.alive, torch.ones_like(new, dtype=torch.bool)], -1)
        if self.scores is not None:
            fresh = torch.zeros(new.shape, dtype=torch.float64)
            fresh[:] = self.rule.fresh_scores(key, value)
            self.scores = torch.cat([self.scores, fresh], -1)
        probabilities, output = self._attend(tokens, rows, evicted)
        self.seen += q
        if self.scores is not None and self.rule.reads_attention:
            self.scores = self.rule.updated_scores(self.scores, probabilities).double()
        fault = self._evict(tokens, engine_kept)
        self.reading.settle()
        return output, fault

    def _attend(self, tokens: Tokens, rows: slice, evicted: int) -> tuple[Tensor, Tensor]:
        """Probabilities [B, Hkv, Hq / Hkv, q, m] and output [B, Hq, q, D], a loop over query heads."""
        keys, values = self.reading.rows()
        places = torch.arange(rows.start, rows.stop)
        here = self.reading.turned(tokens.query[:, :, rows].double())
        inside = self.reading.turned(rotate(tokens.raw_query[:, :, rows], places - evicted, self.theta))
        group = here.shape[1] // keys.shape[1]
        output, every = torch.empty_like(here), []
        for head in range(here.shape[1]):
            kv = head // group
            scores = here[:, head] @ keys[:, kv].mT
            if self.rule.sinks_in_place and evicted:
                sink = self.position[:, kv, None] < self.rule.sinks_in_place
                scores = torch.where(sink, inside[:, head] @ keys[:, kv].mT, scores)
            scores = scores * self.scoring.scaling
            if self.scoring.softcap is not None:
                scores = self.scoring.softcap * torch.tanh(scores / self.scoring.softcap)
            visible = self.alive[:, kv, None] & (self.position[:, kv, None] <= places[:, None])
            weights = torch.where(visible, scores, -math.inf).exp()
            extra = 0.0 if self.scoring.sink_logits is None else float(self.scoring.sink_logits[head].double().exp())
            weights = weights / (weights.sum(-1, keepdim=True) + extra)
            every.append(weights)
            output[:, head] = weights @ values[:, kv]
        return torch.stack(every, 1).unflatten(1, (-1, group)), self.reading.back(output)

    def _score_anew(self, tokens: Tokens) -> None:
        """The rule's scores of the tokens that are alive, oldest first, from the rows that attention reads."""
        batch, heads, _ = self.alive.shape
        rows = self.alive.nonzero()[:, 2].view(batch, heads, -1)
        wide = rows.unsqueeze(-1)
        key, value = (x.gather(2, wide.expand(-1, -1, -1, x.shape[-1])) for x in self.reading.in_model_basis())
        count = next((each.count for each in self.rule.observations() if isinstance(each, RecentQueries)), 0)
        query = tokens.query[:, :, self.seen - count : self.seen].float() if count else None
        assert self.scores is not None
        held = HeldTokens(
            key,
            value,
            self.position.gather(-1, rows),
            self.scores.gather(-1, rows).float(),
            self.seen,
            query,
            self.scoring,
            self.rotation,
        )
        self.scores.scatter_(-1, rows, self.rule.scores_at_eviction(held).double())

    def _evict(self, tokens: Tokens, engine_kept: object) -> str | None:
        count = int(self.alive[0, 0].sum())
        if self.budget is not None and count >= self.budget + self.rule.evicts_every:
            if self.rule.rescores:
                self._score_anew(tokens)
            known = NO_SCORES if self.scores is None else self.scores.float()
            worth = self.rule.priority(known, self.position, self.seen - 1, self.budget, self.layer).double()
        else:
            worth = None
        for b, h in [(b, h) for b in range(self.position.shape[0]) for h in range(self.position.shape[1])]:
            alive = self.alive[b, h].nonzero().flatten().tolist()
            at = {int(self.position[b, h, i]): i for i in alive}
            stay = set(at)
            if worth is not None and self.budget is not None:
                value = {p: float(worth[b, h, i]) for p, i in at.items()}
                stay = set(sorted(at, key=lambda p, value=value: (value[p], p))[count - self.budget :])
            theirs = list(engine_kept[b][h])  # type: ignore[index]
            if theirs != sorted(stay):
                wrong, missing = set(theirs) - stay, stay - set(theirs)
                far = [
                    (p, o)
                    for p in wrong
                    for o in missing
                    if worth is None or not abs(value[p] - value[o]) <= self.tolerance * (1 + abs(value[o]))
                ]
                if far or len(theirs) != len(stay) or not set(theirs) <= set(at):
                    return f"row {b} head {h} keeps {theirs}, not {sorted(stay)}"
            self.alive[b, h] = False
            self.alive[b, h, [at[p] for p in theirs]] = True  # of near-equals either may go: follow the engine
            gone = [i for p, i in at.items() if p not in theirs]
            if self.rule.merges and gone:
                self._merge(b, h, gone)
        return None

    def _merge(self, b: int, h: int, gone: list[int]) -> None:
        """Merge the tokens in the rows `gone` of one head by the rule's own hook, with a loop for the sums."""
        keys, values = (side[:, :, : self.position.shape[-1]] for side in self.reading.read())
        one = slice(b, b + 1), slice(0, h + 1)  # the hook counts heads
        stays = self.alive[one].clone()
        scores = None if self.scores is None else self.scores[one].float()
        victims = torch.tensor(gone).expand(1, h + 1, -1)
        merge = self.rule.merge(
            Evicted(keys[one], values[one], self.position[one], stays, scores, victims, self.layer, self.carried[one])
        )
        if merge.carried is not None:
            self.carried[b, h] = merge.carried[0, h]
        into: dict[int, list[tuple[int, float]]] = {}
        for i, row in enumerate(gone):
            for target, weight in zip(merge.into[0, h, i].tolist(), merge.weight[0, h, i].tolist(), strict=True):
                if weight > 0:
                    into.setdefault(target, []).append((row, weight))
        for target, sources in into.items():
            total = merge.own + sum(weight for _, weight in sources) if merge.mean else 1.0
            new = []
            for rows, changes in ((keys, merge.keys), (values, True)):
                own = rows[b, h, target] * (merge.own if merge.mean else 1.0)
                added = torch.stack([weight * rows[b, h, row] for row, weight in sources]).sum(0)
                new.append((own + added) / total if changes else rows[b, h, target])
            self.reading.replace(b, h, target, *new)
