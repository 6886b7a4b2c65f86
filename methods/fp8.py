"""8-bit floats: e4m3 with one scale per head."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.store import Buffer, DenseSlots, SlotShape, Store, scatter_rows

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448


@dataclass(frozen=True)
class Fp8(Store):
    """Keys and values as e4m3 (Micikevicius et al., 2022, arXiv:2209.05433), with one scale per head.

    The scale of a head is fixed by its prompt: the smallest power of two that brings its largest number to 448 or less.
    Larger numbers that come later are clamped, so they never become infinite. Scaling by a power of two loses no
    precision, and the scale is applied to the query and to the output, so kernels read plain floats. In blocks of a
    pool (`paged`, `adakv`) the scale is that of the pool's first tokens, over all rows, and with adakv over all heads.
    Bits per value: 8. Single slots can be overwritten.
    """

    @property
    def static_scales(self) -> bool:
        return True

    def allocate(self, shape: SlotShape) -> "Fp8Slots":
        return Fp8Slots(shape)

    def planned_bytes(self, shape: SlotShape) -> int:
        return shape.batch * shape.kv_heads * (shape.slots * (shape.key_dim + shape.value_dim) + 2 * 4)


class Fp8Slots(DenseSlots):
    """e4m3 rows [B, Hkv, S, D], and a float32 scale [B, Hkv, 1, 1] for keys and one for values."""

    def __init__(self, shape: SlotShape) -> None:
        super().__init__(shape, E4M3)
        one_a_head = shape.batch, shape.kv_heads, 1, 1
        self.key_scale, self.value_scale = (torch.ones(one_a_head, device=shape.device) for _ in range(2))

    def fill(self, key: Tensor, value: Tensor) -> None:
        self.fit(key, value)
        self.append(key, value)

    def fit(self, key: Tensor, value: Tensor) -> None:
        self.key_scale.copy_(scale_of(key))
        self.value_scale.copy_(scale_of(value))

    def append(self, key: Tensor, value: Tensor) -> None:
        stop = self.length + key.shape[2]
        self.keys[:, :, self.length : stop] = narrow(key, self.key_scale)
        self.values[:, :, self.length : stop] = narrow(value, self.value_scale)
        self.length = stop

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        # As bytes: torch cannot scatter 8-bit floats.
        scatter_rows(self.keys.view(torch.uint8), slot, narrow(key, self.key_scale).view(torch.uint8))
        scatter_rows(self.values.view(torch.uint8), slot, narrow(value, self.value_scale).view(torch.uint8))

    def transform_query(self, query: Tensor) -> Tensor:
        return scaled(query, self.key_scale)

    def restore_keys(self, key: Tensor) -> Tensor:
        return scaled(key, self.key_scale)

    def restore_output(self, output: Tensor) -> Tensor:
        return scaled(output, self.value_scale)

    def buffers(self, kept: int) -> Iterator[Buffer]:
        for rows in (self.keys, self.values):
            yield Buffer("codes", rows, kept / rows.shape[2])
        for scale in (self.key_scale, self.value_scale):
            yield Buffer("scales", scale, 1.0)


def scale_of(rows: Tensor) -> Tensor:
    """The smallest power of two that brings a head's rows [B, Hkv, n, D] within e4m3: float32 [B, Hkv, 1, 1]."""
    largest = rows.to(torch.float32).abs().amax((-2, -1), keepdim=True)
    exponent = torch.frexp(largest / LARGEST).exponent  # largest / LARGEST < 2^exponent
    return torch.where(largest > 0, torch.exp2(exponent.to(torch.float32)), 1.0)


def narrow(rows: Tensor, scale: Tensor) -> Tensor:
    """rows / scale as e4m3, clamped: numbers beyond its range would become NaN."""
    return (rows.to(torch.float32) / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def scaled(rows: Tensor, scale: Tensor) -> Tensor:
    """rows [B, Hq, q, D] times the scale of each query head's KV head."""
    by_head: Tensor = rows.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2)
    return by_head.to(rows.dtype).flatten(1, 2)
