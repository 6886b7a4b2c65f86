"""The record of one prefill, from which every method's cache is built."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.cache.counters import Counters
from kvbench.cache.layer_base import EngineLayer
from kvbench.cache.mla import Latents
from kvbench.cache.observe import Observation
from kvbench.cache.rotary import RotateBack
from kvbench.cache.state import StateLayer, in_model_order
from kvbench.kernels.prefill import Scoring, causal_attention


@dataclass
class LayerRecord:
    """One layer of a prefill.

    index: the layer, as the model counts. key [B, Hkv, T, D] and value [B, Hkv, T, Dv]: as the cache received them,
    keys rotated. scoring: how the layer scores (scaling, softcap, window, sinks). observed: the observations that were
    asked for. rotation: how the layer's rotary embedding is taken off, where an observation needs that. home: where the
    layer runs, if its tensors are in the host's memory.
    """

    index: int
    key: Tensor
    value: Tensor
    scoring: Scoring
    observed: dict[Observation, Tensor] = field(default_factory=dict)
    rotation: RotateBack | None = None
    home: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where caches of the layer are built."""
        return self.key.device if self.home is None else self.home

    def on_host(self) -> "LayerRecord":
        """A copy in the host's memory."""
        return self._moved(torch.device("cpu"), home=self.device)

    def at_home(self) -> "LayerRecord":
        """The record where the layer runs: itself, or a copy if it is in the host's memory."""
        return self if self.home is None else self._moved(self.home, home=None)

    def _moved(self, device: torch.device, home: torch.device | None) -> "LayerRecord":
        key = self.key.to(device, copy=True)
        value = key[..., : self.value.shape[-1]] if self.is_shared else self.value.to(device, copy=True)
        observed = {observation: seen.to(device, copy=True) for observation, seen in self.observed.items()}
        return replace(self, key=key, value=value, observed=observed, home=home)

    @property
    def is_shared(self) -> bool:
        """Whether the value is the first channels of the key, as with latent attention."""
        # By address: GPT-2's keys and values are different parts of one storage.
        return self.key.data_ptr() == self.value.data_ptr()

    def turned_back(self, first: int, count: int) -> Tensor:
        """Keys times the transposed mean rotation over positions first .. first + count - 1: float32 [B, Hkv, T, D]."""
        if self.rotation is None:
            raise RuntimeError("no observation asked for queries before their rotation")
        return self.rotation.by_mean(self.key, first, count)

    @property
    def token_numbers(self) -> int:
        """Numbers cached for a token of a row; with latent attention the value is a part of the key."""
        return self.key.shape[1] * (self.key.shape[-1] + (0 if self.is_shared else self.value.shape[-1]))


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


class RecordLayer(EngineLayer):
    """A cache layer that keeps a prompt's keys and values unchanged and attends exactly.

    latents: where the model has multi-head latent attention, what turns its latents into what is recorded.
    on_host: the record goes to the host's memory as soon as the layer has attended.
    """

    def __init__(
        self,
        index: int,
        observations: Iterable[Observation],
        rotation: RotateBack | None,
        latents: Latents | None = None,
        on_host: bool = False,
    ) -> None:
        super().__init__(Counters())
        self.is_initialized = False
        self.index, self.latents, self.on_host = index, latents, on_host
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.rotation = rotation
        self.wanted = tuple(observations)
        self.observe_ms = dict.fromkeys(self.wanted, 0.0)
        self.record: LayerRecord | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["RecordLayer", Tensor]:
        """Keep a whole prompt, [B, Hkv, T, D] and [B, Hkv, T, Dv]."""
        if self.counters.seen:
            raise RuntimeError("a prefill record takes its prompt in one forward")
        if self.latents is not None:
            key, value = self.latents.keys_and_values(key, value)
        self.keys, self.values, self.is_initialized = key, value, True
        self.counters.accept(key.shape[2])
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Exact causal attention, [B, Hq, T, Dv]; the observations are computed and timed here."""
        if self.keys is None or self.values is None:
            raise RuntimeError("attention before update")
        record = LayerRecord(self.index, self.keys, self.values, scoring, rotation=self.rotation)
        # No rule decides in a sliding-window layer, which is bounded already.
        for observation in self.wanted if scoring.window is None else ():
            started = clock(query.device)
            seen = query if self.latents is None else self.latents.absorb(query)
            record.observed[observation] = observation.compute(seen, self.keys, scoring, self.rotation)
            self.observe_ms[observation] += 1e3 * (clock(query.device) - started)
        held = self.keys, self.values
        output = causal_attention(query, *(held if self.latents is None else self.latents.heads(*held)), scoring)
        self.record = record.on_host() if self.on_host else record
        self.keys = self.values = None  # only the record holds them now
        return output


def record_cache(
    observations: Iterable[Observation],
    rotations: Sequence[RotateBack | None],
    latents: Sequence[Latents] | None = None,
    states: Sequence[StateLayer] = (),
    on_host: bool = False,
) -> Cache:
    """A cache of one `RecordLayer` for each of `rotations`, with `states` at the indices of their layers."""
    wanted = tuple(dict.fromkeys(observations))
    ways: Sequence[Latents | None] = [None] * len(rotations) if latents is None else latents
    elsewhere = {state.index for state in states}
    layers = [
        RecordLayer(i, wanted, rotation, way, on_host)
        for i, (rotation, way) in enumerate(zip(rotations, ways, strict=True))
        if i not in elsewhere
    ]
    return Cache(layers=in_model_order(layers, states))


def clock(device: torch.device) -> float:
    """Seconds on a clock, read when all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
