"""The tokens that a layer holds, in order of position, for rules that score them anew when decode evicts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.mla import Latents
from kvbench.cache.observe import Observation, RecentQueries, recent_queries
from kvbench.cache.ranking import EMPTY
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import RotateBack
from kvbench.cache.slots import Slots
from kvbench.kernels.parts import take
from kvbench.kernels.prefill import Scoring


@dataclass(frozen=True)
class HeldTokens:
    """The n tokens that each head of a layer holds, oldest first, as attention reads them.

    key: float32 [B, Hkv, n, D], rotated. value: float32 [B, Hkv, n, Dv]. position: int64 [B, Hkv, n]. scores: float32
    [B, Hkv, n]. seen: tokens fed so far, which is the position of the next one. query: float32 [B, Hq, w, D], rotated,
    of the newest w tokens, where the rule observes `RecentQueries`; else None. scoring: how the layer scores. rotation:
    how the layer's rotary embedding is taken off, where an observation of the rule needs that.

    In a captured step `seen` is a number on the device (int64 []), so compute with it and do not branch on it.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    scores: Tensor
    seen: int | Tensor
    query: Tensor | None
    scoring: Scoring
    rotation: RotateBack | None = None

    @property
    def recent_query(self) -> Tensor:
        """The newest queries, [B, Hq, w, D]. Raises RuntimeError where none are recorded."""
        if self.query is None:
            raise RuntimeError("no queries: the rule's observations lack RecentQueries")
        return self.query


def held_prompt(record: LayerRecord, observations: tuple[Observation, ...]) -> HeldTokens:
    """All tokens of a prompt, with scores of 0."""
    key, value = record.key.to(torch.float32), record.value.to(torch.float32)
    position = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
    found, zeros = recorded_queries(record, observations), key.new_zeros(()).expand(key.shape[:3])
    query = None if found is None else found.to(torch.float32)
    return HeldTokens(key, value, position, zeros, key.shape[2], query, record.scoring, record.rotation)


def held_in_slots(
    slots: Slots,
    position: Tensor,
    scores: Tensor,
    kept: int,
    seen: int | Tensor,
    query: Tensor | None,
    scoring: Scoring,
    rotation: RotateBack | None,
) -> tuple[HeldTokens, Tensor]:
    """The `kept` tokens of a layer's written slots, and the slot of each: int64 [B, Hkv, kept].

    position, scores: [B, Hkv, S], of the written slots; EMPTY slots are left out.
    """
    never = torch.iinfo(position.dtype).max
    slot = position.masked_fill(position == EMPTY, never).argsort(-1)[..., :kept]
    key, value = (take(rows, slot) for rows in slots.read_back())
    ordered, query = position.gather(-1, slot).long(), None if query is None else query.to(torch.float32)
    return HeldTokens(key, value, ordered, scores.gather(-1, slot), seen, query, scoring, rotation), slot


def recorded_queries(record: LayerRecord, observations: tuple[Observation, ...]) -> Tensor | None:
    """The prompt's newest queries, where `RecentQueries` is among the observations."""
    count = recent_queries(observations)
    return record.observed[RecentQueries(count)] if count else None


def query_ring(record: LayerRecord, observations: tuple[Observation, ...]) -> Tensor | None:
    """Memory for the newest w queries of a layer that evicts, [B, Hq, w, D]: the prompt's, the newest last.

    Zeros stand before a prompt of fewer than w tokens.
    """
    found, count = recorded_queries(record, observations), recent_queries(observations)
    if found is None:
        return None
    ring = found.new_zeros(*found.shape[:2], count, found.shape[3])
    ring[:, :, count - found.shape[2] :] = found
    return ring


def push_queries(ring: Tensor | None, query: Tensor, latents: Latents | None = None) -> None:
    """Move the newest queries [B, Hq, q, D] into the ring, and as many of its oldest out; None: keep none.

    latents: of latent attention, whose queries are kept as the keys that the slots hold want them.
    """
    if ring is not None:
        new = query if latents is None else latents.absorb(query)
        ring.copy_(torch.cat([ring, new.to(ring.dtype)], dim=2)[:, :, -ring.shape[2] :])
