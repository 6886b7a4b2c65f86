"""How kept tokens are held. A `Store` is the configured choice; its `Slots` are one layer's memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.cache.counts import CannotCapture, CapturedSlots
from kvbench.errors import UserError
from kvbench.kernels.parts import Dense, Part

if TYPE_CHECKING:
    from kvbench.cache.basis import Basis
    from kvbench.cache.rotary import KeyRotation


@dataclass(frozen=True)
class SlotShape:
    """What a layer's slots are sized for.

    batch, kv_heads, key_dim (D), value_dim (Dv), slots (tokens held at most), step (most tokens in one forward).
    """

    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    slots: int
    step: int
    dtype: torch.dtype
    device: torch.device


class Buffer(NamedTuple):
    """One preallocated tensor, what it is for, and the share of it that holds tokens now."""

    part: str
    tensor: Tensor
    used: float


class Slots:
    """One layer's preallocated memory for keys and values. Slots 0 .. length - 1 have been written.

    A subclass holds new tokens in `append` and may give up precision in `settle`, which runs after the attention of
    the forward that brought them. Where `writable`, `overwrite` replaces single slots.
    """

    length: int = 0
    position: Tensor
    """int32 [B, Hkv, S], the token in each slot: the layer's own, up to date before a key is written or read."""

    def fill(self, key: Tensor, value: Tensor) -> None:
        """Take what a prefill left to keep, [B, Hkv, n, D] and [B, Hkv, n, Dv], into empty slots."""
        self.append(key, value)

    def fit(self, key: Tensor, value: Tensor) -> None:
        """Fix what a prompt's tokens decide once and for all, as a scale; shapes as in `fill`. Nothing is written."""

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write q tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv], to the slots that follow the last one."""
        raise TypeError(f"{type(self).__name__} cannot append")

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        """Write q tokens to the slots [B, Hkv, q], which need not be the same in every head."""
        raise TypeError(f"{type(self).__name__} cannot overwrite single slots")

    def settle(self) -> None:
        """After a forward: quantise what has left the full-precision residual."""

    def turn_query(self, query: Tensor) -> Tensor:
        """The query [B, Hq, q, D] in the basis that the keys are held in."""
        return query

    def turn_back(self, output: Tensor) -> Tensor:
        """The output [B, Hq, q, Dv] out of the basis that the values are held in."""
        return output

    @property
    def has_quantised(self) -> bool:
        """Whether any token is held in fewer bits than the model's dtype."""
        return False

    def key_parts(self) -> Sequence[Part]:
        """The keys of slots 0 .. length - 1, in order."""
        raise TypeError(f"{type(self).__name__} has no keys")

    def value_parts(self) -> Sequence[Part]:
        """The values of slots 0 .. length - 1, in order."""
        raise TypeError(f"{type(self).__name__} has no values")

    def captured(self) -> CapturedSlots:
        """The same memory for a step that is captured in a CUDA graph. Raises CannotCapture where there is no way."""
        raise CannotCapture(f"{type(self).__name__} counts on the host where it writes")

    def count(self) -> None:
        """A captured step has written one token behind the last one."""
        self.length += 1

    def buffers(self, kept: int) -> Iterator[Buffer]:
        """Every tensor held, with the share in use when `kept` slots hold tokens."""
        raise TypeError(f"{type(self).__name__} has no buffers")


@dataclass(frozen=True)
class Store:
    """A configured way to hold tokens."""

    writable: ClassVar[bool] = True
    """Whether single slots can be overwritten, so that keep rules may evict during decode."""
    holds_latents: ClassVar[bool] = False
    """Whether it can hold MLA's latents: keys within a token, and values of no channels at all."""
    poolable: ClassVar[bool] = True
    """Whether a token is held by itself, wherever its slot lies: then slots can be blocks of a pool."""
    in_blocks: ClassVar[bool] = False
    """Whether slots lie in blocks of a pool, which the reference and the CPU kernel read."""
    brings_cache: ClassVar[bool] = False
    """Whether it is a cache of transformers', which no keep rule combines with, instead of slots."""

    calibrates: ClassVar[bool] = False
    """Whether it has to see calibration text first: see `kvbench.cache.calibrate`."""

    @property
    def fits_prompt(self) -> bool:
        """Whether a prompt decides something once and for all, as a scale, that what is decoded has to live with."""
        return False

    def check(self, key_dim: int, value_dim: int) -> None:
        """Raise UserError where heads of these sizes cannot be held."""

    def calibrated(self, bases: "Sequence[Basis | None]", rotations: "Sequence[KeyRotation | None]") -> "Store":
        """The store with what calibration found of each layer; only called where `calibrates`."""
        raise TypeError(f"{type(self).__name__} takes no calibration")

    def for_layer(self, index: int) -> "Store":
        """The store of one layer. Raises UserError where that takes calibration which has not taken place."""
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


def scatter_rows(buffer: Tensor, slot: Tensor, rows: Tensor) -> None:
    """buffer[b, h, slot[b, h, i]] = rows[b, h, i]: buffer [B, Hkv, S, ...], slot [B, Hkv, q], rows [B, Hkv, q, ...]."""
    index = slot.reshape(*slot.shape, *([1] * (rows.ndim - 3))).expand_as(rows)
    buffer.scatter_(2, index, rows.to(buffer.dtype))
