"""One decode step of a whole cache in captured form.

`DecodeStep.run` is what a CUDA graph is made of. It works in any device's memory, so that it can be compared with the
eager cache without a GPU.
"""

from dataclasses import astuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.caches import KVCache, Layer
from kvbench.cache.captured_layers import CapturedLayer, CapturedRagged, evicts_in_blocks
from kvbench.cache.counters import BlockCounters, DeviceCounters
from kvbench.cache.forward import forward
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.slots import CannotCapture
from kvbench.cache.state import in_model_order
from kvbench.kernels import LengthsKernel


class DecodeStep:
    """One decode step of a cache, q = 1, with everything that changes between steps on the device.

    `run` and `flush` queue work on the device and read no host number that changes between steps: a CUDA graph captures
    them. The caller puts the token into `ids`, lets the host `prepare` the step, runs it, lets the host `count` it, and
    then runs the flushes that `count` returns. States are the eager cache's, written in place by the model. The eager
    cache is right after every step and can go on by itself.

    ids: int64 [B, 1]. seen: int64 [], its position. groups: counters on the device; layers that count alike share them.

    Raises CannotCapture where the model, the method or the store has no captured form, naming it.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.model, self.eager = model, cache
        logits = cache.last_logits
        self.ids = torch.zeros(logits.shape[0], 1, dtype=torch.int64, device=logits.device)
        self.seen = torch.full((), cache.seen, device=logits.device)
        groups: dict[object, DeviceCounters] = {}
        self.layers = [self._captured(layer, groups) for layer in cache.attention_layers]
        self.groups = list(groups.values())
        self.cache = Cache(layers=in_model_order(self.layers, cache.states))

    def _captured(self, layer: Layer, groups: dict[object, DeviceCounters]) -> CapturedLayer | CapturedRagged:
        """The captured form of one layer, with counters from `groups` where a layer before it counts alike."""
        kernel = layer.kernel
        if not isinstance(kernel, LengthsKernel):
            raise CannotCapture(f"the kernel {kernel.name} is told on the host how much is filled")
        if layer.evicts_to is not None and layer.rule.needs_host:
            raise CannotCapture(f"{layer.rule.name} reads on the host how it scores tokens")
        if isinstance(layer, RaggedLayer):
            return CapturedRagged(layer, self.seen)
        slots = layer.slots.captured()
        query = self.eager.last_logits.new_empty(0, dtype=self.model.dtype)
        n_sink = layer.rule.sinks_in_place
        if (reason := kernel.refuses_lengths(query, slots.key_parts(), slots.value_parts(), n_sink)) is not None:
            raise CannotCapture(reason)
        key = type(slots), slots.packed, astuple(layer.counters), evicts_in_blocks(layer)
        if key not in groups:
            if evicts_in_blocks(layer):
                groups[key] = BlockCounters(layer.counters, self.seen, slots.packed, slots.packs)
            else:
                groups[key] = slots.device_counters(layer.counters, self.seen)
        return CapturedLayer(layer, slots, groups[key], kernel)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """The step: logits [B, 1, V] of the token in `ids`."""
        for device in self.groups:
            device.accept()
        position = self.seen.expand_as(self.ids)
        with kvbench_attention(self.model):
            logits = forward(self.model, self.ids, self.cache, logits_to_keep=1, position_ids=position)
        for device in self.groups:
            device.evict()
        self.seen.add_(1)
        return logits

    @torch.inference_mode()
    def flush(self, device: DeviceCounters) -> None:
        """Quantise a full residual, or evict a block, in the layers that share the counters `device`."""
        for layer in self.layers:
            if isinstance(layer, CapturedLayer) and layer.device is device:
                layer.flush()
        device.flush()

    def prepare(self) -> None:
        """On the host, before each step."""
        for layer in self.layers:
            layer.prepare()

    def count(self) -> list[DeviceCounters]:
        """Count on the host one step that has run; returns the counters whose layers have to be flushed now."""
        due: dict[int, DeviceCounters] = {}
        for layer in self.layers:
            if layer.count() and layer.device is not None:
                due[id(layer.device)] = layer.device
        self.eager.positions_processed += 1
        return list(due.values())

    def mutable_state(self) -> list[Tensor]:
        """Tensors that a step changes, except slots that had not been written before it."""
        counters = [tensor for device in self.groups for tensor in device.tensors()]
        layers = [tensor for layer in self.layers for tensor in layer.mutable_state()]
        return [self.seen, *counters, *layers, *(tensor for state in self.eager.states for tensor in state.tensors())]
