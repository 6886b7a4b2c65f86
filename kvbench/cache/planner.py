"""The plans of the layers of one method's cache, whether its prompt is read in one piece or in chunks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from kvbench.cache.decode_kernel import decode_kernel
from kvbench.cache.method import Method
from kvbench.cache.mla import Latents, latents_of
from kvbench.cache.plan import LayerPlan, plan_layer
from kvbench.cache.prefill import rotations_of
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import IN_CACHE, RotateBack
from kvbench.kernels import Kernel

Kernels = dict[str, Kernel]
"""The kernels that caches decode on, by the type of a layer's device."""


@dataclass(frozen=True)
class Planner:
    """Plans layer by layer. compressed: indices of the layers that the method applies to, ascending. latents,
    rotations: of every layer of the model. max_new_tokens, step: as `LayerPlan` takes them."""

    method: Method
    compressed: Sequence[int]
    kernels: Kernels
    latents: Sequence[Latents] | None
    rotations: Sequence[RotateBack | None]
    max_new_tokens: int
    step: int

    def plan(self, record: LayerRecord, prompt: int | None = None) -> LayerPlan:
        """The plan of a layer, from its record; prompt: tokens of the prompt, where the record holds a chunk of it."""
        index = record.index
        applies = index in self.compressed
        depth = self.compressed.index(index) if applies else 0
        latents = None if self.latents is None else self.latents[index]
        plan = plan_layer(self.method, record, len(self.compressed), depth, latents, prompt)
        rotation = self.rotations[index] if applies else None
        return replace(
            plan,
            kernel=self.kernels[record.device.type],
            rotate_back=rotation or plan.rotate_back,
            max_new_tokens=self.max_new_tokens,
            step=self.step,
        )


def planner_of(
    model: PreTrainedModel, method: Method, compressed: Sequence[int], kernels: Kernels, max_new_tokens: int, step: int
) -> Planner:
    """The planner of a method's caches; arguments as in `Planner`."""
    rotations = rotations_of(model, method.rule.sinks_in_place > 0, IN_CACHE)
    return Planner(method, compressed, kernels, latents_of(model), rotations, max_new_tokens, step)


def kernels_on(
    devices: Iterable[torch.device], method: Method, model: PreTrainedModel, dtype: torch.dtype, wanted: str
) -> Kernels:
    """The kernel for each device. Choosing may compile, so call this before a clock starts."""
    return {device.type: decode_kernel(method, model, dtype, wanted, device) for device in set(devices)}
