"""A Llama by hand and the methods upon it, step by step, with masks and Python loops.

Nothing here is shared with the engine. A layer's history keeps every token for ever; an evicted token is
masked, a quantised one is replaced by what dequantising gives back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.shared.reference import (
    along_channels,
    along_tokens,
    attention_matrix,
    attention_output,
    causal_mask,
    per_kv_head,
    rotate,
)

# ---------------------------------------------------------------- one layer's history


@dataclass
class History:
    """Every token of one layer, and which of them are still visible. Keeps all of them, as they are.

    raw [B, Hkv, n, D]: keys before rotation. key, value: what attention reads now. alive [B, Hkv, n].
    """

    layer: int
    theta: float
    raw: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    alive: Tensor | None = None

    @property
    def seen(self) -> int:
        return 0 if self.raw is None else self.raw.shape[2]

    def extend(self, raw: Tensor, value: Tensor) -> None:
        """Append q tokens: raw keys and values [B, Hkv, q, D]."""
        key = rotate(raw, torch.arange(self.seen, self.seen + raw.shape[2]), self.theta)
        alive = torch.ones(raw.shape[:3], dtype=torch.bool)
        if self.raw is None:
            self.raw, self.key, self.value, self.alive = raw, key, value, alive
            return
        key, value = self.as_stored(key), self.as_stored(value)
        self.raw = torch.cat([self.raw, raw], dim=2)
        self.key = torch.cat([self.key, key], dim=2)
        self.value = torch.cat([self.value, value], dim=2)
        self.alive = torch.cat([self.alive, alive], dim=2)

    def as_stored(self, rows: Tensor) -> Tensor:
        """What attention reads a token as: a prompt's after the prefill, a later one from its own step on."""
        return rows

    def attend(self, raw_query: Tensor) -> Tensor:
        """The q newest tokens over everything alive, causally; then the method's own decision."""
        q = raw_query.shape[2]
        probabilities = self.probabilities(raw_query, self.visible(raw_query.shape[1], q))
        output = attention_output(probabilities, self.value)
        if q == self.seen:
            self.key, self.value = self.as_stored(self.key), self.as_stored(self.value)
        self.after(probabilities)
        return output

    def visible(self, heads: int, q: int) -> Tensor:
        """bool [B, Hq, q, n]: alive and not in a row's future."""
        past = causal_mask(self.seen)[self.seen - q :]
        return (self.alive[:, :, None] & past).repeat_interleave(heads // self.alive.shape[1], dim=1)

    def probabilities(self, raw_query: Tensor, visible: Tensor) -> Tensor:
        positions = torch.arange(self.seen - raw_query.shape[2], self.seen)
        query = rotate(raw_query, positions, self.theta)
        return attention_matrix(query, self.key, visible, raw_query.shape[-1] ** -0.5)

    def after(self, probabilities: Tensor) -> None:
        """What the method does once a forward's attention is done."""

    def kept(self) -> list[list[list[int]]]:
        """Positions still alive, per batch row and head."""
        return [[row.nonzero().flatten().tolist() for row in batch] for batch in self.alive]


@dataclass
class PerTokenHistory(History):
    """Each token's key and value in groups of channels."""

    bits: int = 4
    group: int = 32

    def as_stored(self, rows: Tensor) -> Tensor:
        return along_channels(rows, self.bits, self.group)


@dataclass
class KiviHistory(History):
    """Full precision when it arrives; the oldest tokens are replaced by their codes' values after a step."""

    bits: int = 4
    group: int = 32
    residual: int = 128
    quantised_keys: int = 0
    quantised_values: int = 0

    def after(self, probabilities: Tensor) -> None:
        while self.seen - self.quantised_keys >= self.residual:
            block = slice(self.quantised_keys, self.quantised_keys + self.residual)
            self.key[:, :, block] = along_tokens(self.key[:, :, block], self.bits, self.group)
            self.quantised_keys += self.residual
        while self.seen - self.quantised_values > self.residual:
            token = slice(self.quantised_values, self.quantised_values + 1)
            self.value[:, :, token] = along_channels(self.value[:, :, token], self.bits, self.group)
            self.quantised_values += 1


Positions, Scores = list[int], list[float]

# A rule gets (layer, head, alive positions ascending, their scores, tokens seen, budget) and says which stay.
Keeps = Callable[[int, int, Positions, Scores, int, int], set[int]]


@dataclass
class EvictingHistory(History):
    """Masks tokens after each forward, one decision per batch row and KV head.

    bits: 0 for dense, else per-token codes. combine: how query heads join into scores, None for no scores.
    in_cache: rotate keys and queries to their places among the kept tokens instead of their positions.
    """

    keeps: Keeps = field(default=lambda *_: set())
    budget: int = 0
    combine: str | None = None
    in_cache: bool = False
    bits: int = 0
    group: int = 32
    scores: Tensor | None = None

    def as_stored(self, rows: Tensor) -> Tensor:
        return along_channels(rows, self.bits, self.group) if self.bits else rows

    def probabilities(self, raw_query: Tensor, visible: Tensor) -> Tensor:
        if not self.in_cache:
            return super().probabilities(raw_query, visible)
        # A key's place: how many kept tokens come before it. A query's place is that of its own key.
        place = self.alive.long().cumsum(-1) - 1
        group, q = raw_query.shape[1] // self.alive.shape[1], raw_query.shape[2]
        own = place[:, :, -q:].repeat_interleave(group, dim=1)
        query, key = rotate(raw_query, own, self.theta), rotate(self.raw, place, self.theta)
        return attention_matrix(query, key, visible, raw_query.shape[-1] ** -0.5)

    def after(self, probabilities: Tensor) -> None:
        batch, heads, n = self.alive.shape
        if self.combine is not None:
            old = torch.zeros(batch, heads, n)
            if self.scores is not None:
                old[..., : self.scores.shape[-1]] = self.scores
            new = per_kv_head(probabilities, heads, self.combine).sum(2)
            self.scores = (old.double() + new).float()
        for b in range(batch):
            for h in range(heads):
                positions = self.alive[b, h].nonzero().flatten().tolist()
                if len(positions) <= self.budget:
                    continue
                scores = [] if self.scores is None else self.scores[b, h, positions].tolist()
                stay = self.keeps(self.layer, h, positions, scores, n, self.budget)
                self.alive[b, h] = False
                self.alive[b, h, sorted(stay)] = True
                self.merge(b, h, sorted(set(positions) - stay), sorted(stay))

    def merge(self, b: int, h: int, gone: Positions, stay: Positions) -> None:
        """What happens to the rows of evicted tokens; nothing here."""


def h2o_keeps(recent: int | None = None) -> Keeps:
    """The last `recent` (half the budget) and of the others the best by score; of equals the newer stays."""

    def keeps(_: int, __: int, positions: Positions, scores: Scores, seen: int, budget: int) -> set[int]:
        last = budget // 2 if recent is None else recent
        newest = [p for p in positions if p >= seen - last]
        others = [(s, p) for p, s in zip(positions, scores, strict=True) if p < seen - last]
        return {*newest, *(p for _, p in sorted(others, reverse=True)[: budget - last])}

    return keeps


def streaming_keeps(n_sink: int) -> Keeps:
    """The first n_sink positions and the newest budget - n_sink."""

    def keeps(_: int, __: int, positions: Positions, ___: Scores, seen: int, budget: int) -> set[int]:
        window = budget - n_sink
        return {p for p in positions if p < n_sink or p >= seen - window}

    return keeps


def random_keeps(seed: int) -> Keeps:
    """The first four; half the rest of the budget newest; of the others those with the largest hash of (seed, layer,
    head, position)."""

    def mix(x: int) -> int:
        x &= 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return (x ^ x >> 16) % 2**31

    def keeps(layer: int, head: int, positions: Positions, _: Scores, seen: int, budget: int) -> set[int]:
        sinks = {p for p in positions if p < 4}
        newest = {p for p in positions if p >= seen - (budget - 4) // 2}
        drawn = sorted(((mix(mix(mix(mix(p) ^ head) ^ layer) ^ seed), p) for p in positions), reverse=True)
        others = [p for _, p in drawn if p not in sinks | newest]
        return sinks | newest | set(others[: budget - len(sinks | newest)])

    return keeps


# ---------------------------------------------------------------- a whole Llama by hand


class SlowLlama:
    """A Llama's forward from its weights, in float64, over one `History` a layer."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        config = model.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.theta = float(config.rope_parameters["rope_theta"])

    def histories(self, kind: type[History] = History, **settings: object) -> list[History]:
        """An empty history for every layer."""
        return [kind(layer, self.theta, **settings) for layer in range(self.layers)]

    @torch.inference_mode()
    def __call__(self, ids: Tensor, histories: list[History]) -> Tensor:
        """Logits [B, q, V] of q tokens that follow what the histories hold."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer, history in enumerate(histories):

            def projected(name: str, x: Tensor, layer: int = layer) -> Tensor:
                return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

            normed = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
            query = self._heads(projected("self_attn.q_proj", normed), self.heads)
            key = self._heads(projected("self_attn.k_proj", normed), self.kv_heads)
            value = self._heads(projected("self_attn.v_proj", normed), self.kv_heads)
            history.extend(key, value)
            attended = history.attend(query).transpose(1, 2).flatten(2)
            x = x + projected("self_attn.o_proj", attended)
            normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            gate = projected("mlp.gate_proj", normed)
            x = x + projected("mlp.down_proj", gate / (1 + (-gate).exp()) * projected("mlp.up_proj", normed))
        return self._norm(x, "model.norm.weight") @ self.weights["lm_head.weight"].T

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[weight]


@dataclass
class MaskedHistory(History):
    """A whole prompt at once under any mask [n, n]."""

    mask: Tensor | None = None

    def visible(self, heads: int, q: int) -> Tensor:
        return self.mask.expand(self.alive.shape[0], heads, q, q)


def masked_forward(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits [B, T, V] of one forward in which token i sees token j where mask[i, j]."""
    reference = SlowLlama(model)
    return reference(ids, reference.histories(MaskedHistory, mask=mask))
