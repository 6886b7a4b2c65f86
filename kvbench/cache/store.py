"""How kept tokens are held. A `Store` is the configured choice; its `Slots` are one layer's memory.

What the author of a store needs is imported from here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.cache.basis import Basis
from kvbench.cache.observe import Observation
from kvbench.cache.rotary import KeyRotation
from kvbench.cache.slots import Buffer, CannotCapture, CapturedSlots, Slots, SlotShape, scatter_rows
from kvbench.errors import UserError
from kvbench.kernels.parts import Dense, Part

__all__ = [
    "Buffer",
    "CannotCapture",
    "CapturedSlots",
    "DenseSlots",
    "DenseStore",
    "SlotShape",
    "Slots",
    "Store",
    "scatter_rows",
]


@dataclass(frozen=True)
class Store:
    """A configured way to hold tokens."""

    writable: ClassVar[bool] = True
    """Whether single slots can be overwritten, so that keep rules may evict during decode."""
    mergeable: ClassVar[bool] = False
    """Whether single slots can be read in the model's basis and overwritten, so that keep rules may merge tokens."""
    holds_latents: ClassVar[bool] = False
    """Whether the store can hold the latents of multi-head latent attention: keys alone, and values of no channels."""
    poolable: ClassVar[bool] = True
    """Whether a token can be held in any slot, so that slots can be blocks of a pool."""
    in_blocks: ClassVar[bool] = False
    """Whether slots lie in blocks of a pool, which the reference and the CPU kernel read."""
    brings_cache: ClassVar[bool] = False
    """Whether the store is a cache of transformers', without slots; no keep rule combines with it."""
    calibrates: ClassVar[bool] = False
    """Whether the store needs calibration text first: see `kvbench.cache.calibrate`."""

    @property
    def static_scales(self) -> bool:
        """Whether scales are fixed from the prompt."""
        return False

    def check(self, key_dim: int, value_dim: int) -> None:
        """Raise UserError where heads of these sizes cannot be held."""

    def calibrated(self, bases: Sequence[Basis | None], rotations: Sequence[KeyRotation | None]) -> "Store":
        """The store with the bases and rotations of all layers; only called where `calibrates`."""
        raise TypeError(f"{type(self).__name__} takes no calibration")

    def for_layer(self, index: int) -> "Store":
        """The store of one layer. Raises UserError where the store has not been calibrated and needs it."""
        return self.at_layer(index)

    def at_layer(self, index: int) -> "Store":
        """The store of one layer, as far as it is known without calibration: where settings differ by layer."""
        return self

    def observations(self) -> tuple[Observation, ...]:
        """What the store needs to know of the prompt's queries."""
        return ()

    def with_observed(self, observed: Mapping[Observation, Tensor]) -> "Store":
        """The store of a layer whose prompt was observed so."""
        return self

    def allocate(self, shape: SlotShape) -> Slots:
        """Empty slots of that shape."""
        raise TypeError(f"{type(self).__name__} cannot allocate")

    def planned_bytes(self, shape: SlotShape) -> int:
        """Bytes that slots of that shape will take, by formula: nothing is allocated."""
        raise TypeError(f"{type(self).__name__} does not know its bytes")


class DenseSlots(Slots):
    """Rows of one dtype: keys [B, Hkv, S, D], values [B, Hkv, S, Dv]. `is_narrower`: than the model's."""

    def __init__(self, shape: SlotShape, dtype: torch.dtype) -> None:
        lead = shape.batch, shape.kv_heads, shape.slots
        self.keys = torch.empty(*lead, shape.key_dim, dtype=dtype, device=shape.device)
        self.values = torch.empty(*lead, shape.value_dim, dtype=dtype, device=shape.device)
        self.wide = torch.promote_types(shape.dtype, torch.float32)
        self.is_narrower = dtype.itemsize < shape.dtype.itemsize

    def append(self, key: Tensor, value: Tensor) -> None:
        stop = self.length + key.shape[2]
        self.keys[:, :, self.length : stop] = key
        self.values[:, :, self.length : stop] = value
        self.length = stop

    @property
    def has_quantised(self) -> bool:
        return self.is_narrower and self.length > 0

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        scatter_rows(self.keys, slot, key)
        scatter_rows(self.values, slot, value)

    def key_parts(self) -> Sequence[Part]:
        return [Dense(self.keys[:, :, : self.length])]

    def value_parts(self) -> Sequence[Part]:
        return [Dense(self.values[:, :, : self.length])]

    def captured(self) -> CapturedSlots:
        return CapturedSlots(self, [Dense(self.keys)], [Dense(self.values)])

    def buffers(self, kept: int) -> Iterator[Buffer]:
        for tensor in (self.keys, self.values):
            yield Buffer("dense", tensor, kept / tensor.shape[2])


@dataclass(frozen=True)
class DenseStore(Store):
    """Keys and values as the model made them, or rounded to a 16-bit `dtype` ("float16", "bfloat16")."""

    dtype: Literal["float16", "bfloat16"] | None = None

    mergeable = True
    holds_latents = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float16", "bfloat16"):
            raise UserError(f"dtype={self.dtype} for a dense store; type float16 or bfloat16")

    def allocate(self, shape: SlotShape) -> DenseSlots:
        return DenseSlots(shape, self._held_dtype(shape))

    def planned_bytes(self, shape: SlotShape) -> int:
        rows = shape.batch * shape.kv_heads * shape.slots
        return rows * (shape.key_dim + shape.value_dim) * self._held_dtype(shape).itemsize

    def _held_dtype(self, shape: SlotShape) -> torch.dtype:
        return shape.dtype if self.dtype is None else getattr(torch, self.dtype)
