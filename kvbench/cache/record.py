"""The record of one prefill: what every method's cache is built from."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.cache.mla import Latents
from kvbench.cache.observe import Observation
from kvbench.cache.rotary import RotateBack
from kvbench.cache.state import StateLayer, in_model_order
from kvbench.kernels.prefill import Scoring, causal_attention


@dataclass
class LayerRecord:
    """One layer of a prefill.

    index: the layer, as the model counts. key [B, Hkv, T, D] and value [B, Hkv, T, Dv]: as the cache received them,
    keys rotated. scoring: how the layer scores (scaling, softcap, window, sinks). observed: the asked-for quantities.
    rotation: how the layer's rotary embedding is taken off again, where an observation needs that.
    """

    index: int
    key: Tensor
    value: Tensor
    scoring: Scoring
    observed: dict[Observation, Tensor] = field(default_factory=dict)
    rotation: RotateBack | None = None

    def turned_back(self, first: int, count: int) -> Tensor:
        """Keys times the transposed mean rotation over positions first .. first + count - 1: float32 [B, Hkv, T, D]."""
        if self.rotation is None:
            raise RuntimeError("no observation asked for queries before their rotation")
        return self.rotation.by_mean(self.key, first, count)

    @property
    def token_numbers(self) -> int:
        """Numbers that a token of a row takes: with latent attention the value is a part of the key."""
        shared = self.key.untyped_storage().data_ptr() == self.value.untyped_storage().data_ptr()
        return self.key.shape[1] * (self.key.shape[-1] + (0 if shared else self.value.shape[-1]))


@dataclass
class PrefillRecord:
    """A prompt, run once with exact attention.

    ids: [B, T]. logits: [B, V], of the last prompt token. prefill_ms: wall time without the observations.
    observe_ms: wall time of each observation, summed over layers. layers: those with keys and values. states: those
    that keep a state of fixed size, as it was after the prompt.
    """

    ids: Tensor
    logits: Tensor
    layers: list[LayerRecord]
    prefill_ms: float
    observe_ms: dict[Observation, float]
    states: list[StateLayer] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return self.ids.shape[1]


class RecordLayer(CacheLayerMixin):
    """A cache layer that keeps a prompt's keys and values as they come, and attends exactly.

    latents: where the model has multi-head latent attention, what turns its latents into what is recorded.
    """

    is_sliding = False

    def __init__(self, index: int, observations: Iterable[Observation], rotation: RotateBack | None,
                 latents: Latents | None = None) -> None:  # fmt: skip
        super().__init__()
        self.index, self.latents = index, latents
        self.rotation = rotation
        self.wanted = tuple(observations)
        self.observe_ms = dict.fromkeys(self.wanted, 0.0)
        self.record: LayerRecord | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["RecordLayer", Tensor]:
        """Take a whole prompt, [B, Hkv, T, D] and [B, Hkv, T, Dv]."""
        if self.is_initialized:
            raise RuntimeError("a prefill record takes its prompt in one forward")
        if self.latents is not None:
            key, value = self.latents.entries(key, value)
        self.keys, self.values, self.is_initialized = key, value, True
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Exact causal attention, [B, Hq, T, Dv]; the observations are made, and timed, on the way."""
        if self.keys is None or self.values is None:
            raise RuntimeError("attention before update")
        self.record = LayerRecord(self.index, self.keys, self.values, scoring, rotation=self.rotation)
        # A layer with a window of its own is bounded already and no rule decides there.
        for observation in self.wanted if scoring.window is None else ():
            started = clock(query.device)
            seen = query if self.latents is None else self.latents.absorb(query)
            self.record.observed[observation] = observation.compute(seen, self.keys, scoring, self.rotation)
            self.observe_ms[observation] += 1e3 * (clock(query.device) - started)
        if self.latents is not None:
            return causal_attention(query, *self.latents.heads(self.keys, self.values), scoring)
        return causal_attention(query, self.keys, self.values, scoring)

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def record_cache(observations: Iterable[Observation], rotations: Sequence[RotateBack | None],
                 latents: Sequence[Latents] | None = None, states: Sequence[StateLayer] = ()) -> Cache:  # fmt: skip
    """A cache of `RecordLayer`s, one for each of `rotations`, but of `states` in their places."""
    wanted = tuple(dict.fromkeys(observations))
    ways: Sequence[Latents | None] = [None] * len(rotations) if latents is None else latents
    elsewhere = {state.index for state in states}
    layers = [RecordLayer(i, wanted, rotation, way)
              for i, (rotation, way) in enumerate(zip(rotations, ways, strict=True)) if i not in elsewhere]  # fmt: skip
    return Cache(layers=in_model_order(layers, states))


def clock(device: torch.device) -> float:
    """Seconds, after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
