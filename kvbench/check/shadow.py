"""A second way to compute what an evicting cache computes: the whole history, and a mask of what the cache holds.

The shadow takes from the cache nothing but which positions it holds. Slots that were overwritten wrongly, tokens at
wrong positions and wrongly turned queries all make the two differ.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.cache.caches import KVCache, Layer
from kvbench.cache.layer import SlotLayer
from kvbench.cache.mla import Latents
from kvbench.cache.record import LayerRecord, PrefillRecord
from kvbench.cache.state import in_model_order
from kvbench.kernels import reference
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Dense
from kvbench.kernels.prefill import Scoring


class ShadowLayer(CacheLayerMixin):
    """Every key and value of one layer so far, [B, Hkv, T, D], attended as `held` [B, Hkv, T] allows.

    evicted: tokens given up by the cache; where it counts distances inside the cache (`sinks_in_place`), the first
    keys are moved forward by that many positions. (The cache moves the query backward instead.)
    """

    is_sliding = False

    def __init__(self, record: LayerRecord) -> None:
        super().__init__()
        self.keys, self.values = record.key, record.value
        self.held = torch.zeros(0)
        self.layer: Layer | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the record brings keys and values."""

    def look(self, layer: Layer) -> None:
        """Note which positions the cache's layer holds before its next forward."""
        self.layer, self.held = layer, held_positions(layer) > 0

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["ShadowLayer", Tensor]:
        """Take the tokens of a forward, [B, Hkv, q, D] and [B, Hkv, q, Dv]."""
        if (latents := self.latents) is not None:
            key, value = latents.keys_and_values(key, value)
        self.keys = torch.cat([self.keys, key], dim=2)
        self.values = torch.cat([self.values, value], dim=2)
        return self, value

    @property
    def latents(self) -> Latents | None:
        """How the layer's latents become keys and values, None where it has none."""
        return self.layer.latents if isinstance(self.layer, SlotLayer) else None

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of one token, [B, Hq, 1, Dv], over what the cache held and the token itself."""
        if (latents := self.latents) is not None and latents.layout != "expand":
            latent = self._attend(latents.absorb(query), scoring)
            return latents.project(latent)
        return self._attend(query, scoring)

    def _attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        keys, layer = self.keys, self.layer
        visible = torch.cat([self.held, self.held.new_ones(*self.held.shape[:2], 1)], dim=-1)
        n_sink = layer.rule.sinks_in_place if layer is not None and layer.evicted else 0
        if n_sink and isinstance(layer, SlotLayer) and layer.rotate_back is not None:
            turn = layer.rotate_back
            cos, sin = (angle.to(keys.dtype) for angle in turn.angles(query, layer.evicted))
            sinks = keys[:, :, :n_sink]
            keys = torch.cat([turn.apply(sinks, sinks, cos, sin)[1], keys[:, :, n_sink:]], dim=2)
        options = AttendOptions(visible.unsqueeze(2))
        output, _ = reference.attend(query, [Dense(keys)], [Dense(self.values)], scoring, options)
        return output

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def shadow_of(record: PrefillRecord) -> Cache:
    """A shadow of any cache that is built from the record."""
    layers = [ShadowLayer(layer) for layer in record.layers]
    return Cache(layers=in_model_order(layers, [state.copy() for state in record.states]))


def look(shadow: Cache, cache: KVCache) -> None:
    """Note what the cache holds now; do it before each forward."""
    shadows = [layer for layer in shadow.layers if isinstance(layer, ShadowLayer)]
    for layer, other in zip(shadows, cache.attention_layers, strict=True):
        layer.look(other)


def held_positions(layer: Layer) -> Tensor:
    """How many slots hold each position so far: int64 [B, Hkv, seen]; anything but 0 and 1 is a fault."""
    position = layer.positions().long()
    known = (position >= 0) & (position < layer.seen)
    counts = torch.zeros(*position.shape[:2], layer.seen, dtype=torch.int64, device=position.device)
    return counts.scatter_add_(-1, position.clamp(0, layer.seen - 1), known.long())
