"""Preallocated quantised rows: the memory of stores that quantise in groups."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.cache.rule import is_whole
from kvbench.cache.slots import Buffer, SlotShape, scatter_rows
from kvbench.errors import UserError
from kvbench.kernels import choose
from kvbench.kernels.cpu import CpuKernel
from kvbench.kernels.parts import Axis, Packed
from kvbench.kernels.quantise import BITS, pack, quantise

SMALLEST_GROUP = 8
"""In smaller groups the float16 pair takes as many bytes as the codes save."""


class Groups:
    """Rows of one layer's keys or values as codes with a float16 pair a group; the shapes are `Packed`'s.

    axis "token": rows come in multiples of group_size. axis "channel": row by row, and rows can be replaced.
    length: rows held.
    """

    def __init__(self, axis: Axis, bits: int, group_size: int, rows: int, width: int, shape: SlotShape) -> None:
        self.axis: Axis = axis
        self.bits, self.group_size, self.length = bits, group_size, 0
        grid = (rows // group_size, width) if axis == "token" else (rows, width // group_size)
        lead, device = (shape.batch, shape.kv_heads), shape.device
        self.codes = torch.empty(*lead, *grid, group_size * bits // 8, dtype=torch.uint8, device=device)
        self.scale = torch.empty(*lead, *grid, dtype=torch.float16, device=device)
        self.minimum = torch.empty(*lead, *grid, dtype=torch.float16, device=device)

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes and pair of rows [B, Hkv, n, D], laid out as the buffers are."""
        if self.axis == "token":
            groups = rows.unflatten(2, (-1, self.group_size)).transpose(-1, -2)
        else:
            groups = rows.unflatten(-1, (rows.shape[-1] // self.group_size, self.group_size))
        if groups.device.type == "cpu" and groups.dtype == torch.float32:
            kernel = choose(groups.device)
            if isinstance(kernel, CpuKernel):
                return kernel.encode(groups, self.bits)
        codes, scale, minimum = quantise(groups, self.bits)
        return pack(codes, self.bits), scale, minimum

    def append(self, rows: Tensor) -> None:
        """Quantise rows [B, Hkv, n, D] behind those held."""
        if rows.shape[2] == 0:
            return
        unit = self.group_size if self.axis == "token" else 1
        target = slice(self.length // unit, (self.length + rows.shape[2]) // unit)
        for buffer, new in zip((self.codes, self.scale, self.minimum), self._encode(rows), strict=True):
            buffer[:, :, target] = new
        self.length += rows.shape[2]

    def overwrite(self, slot: Tensor, rows: Tensor) -> None:
        """Quantise rows [B, Hkv, q, D] into the slots [B, Hkv, q]; axis "channel" only."""
        for buffer, new in zip((self.codes, self.scale, self.minimum), self._encode(rows), strict=True):
            scatter_rows(buffer, slot, new)

    def put(self, index: Tensor, rows: Tensor) -> None:
        """Quantise rows [B, Hkv, n, D] into the rows `index`, int64 [n], or with axis "token" into the groups
        `index`, [n / G]; all on the device, and `length` stays."""
        for buffer, new in zip((self.codes, self.scale, self.minimum), self._encode(rows), strict=True):
            buffer.index_copy_(2, index, new)

    def whole(self) -> Packed:
        """All rows, held or not."""
        return Packed(self.codes, self.scale, self.minimum, self.bits, self.group_size, self.axis)

    def parts(self) -> list[Packed]:
        """The rows held, as one part; none where nothing is held."""
        if self.length == 0:
            return []
        n = self.length // self.group_size if self.axis == "token" else self.length
        return [
            Packed(
                self.codes[:, :, :n],
                self.scale[:, :, :n],
                self.minimum[:, :, :n],
                self.bits,
                self.group_size,
                self.axis,
            )
        ]

    def buffers(self, kept: int | None = None) -> Iterator[Buffer]:
        """The three tensors, with the share in use when `kept` rows hold tokens (None: all rows held)."""
        capacity = self.codes.shape[2] * (self.group_size if self.axis == "token" else 1)
        used = (self.length if kept is None else kept) / capacity if capacity else 1.0
        yield Buffer("codes", self.codes, used)
        yield Buffer("scales", self.scale, used)
        yield Buffer("scales", self.minimum, used)


def planned_groups(bits: int, group_size: int, rows: int, width: int, shape: SlotShape) -> int:
    """Bytes of `Groups` with that many rows of `width` numbers, by formula: codes, and a float16 pair a group."""
    groups = shape.batch * shape.kv_heads * rows * width // group_size
    return groups * (group_size * bits // 8 + 4)


def check_groups(
    who: str, group_size: int, *bits: int, head_dim: int | None = None, widths: tuple[int, ...] = BITS
) -> None:
    """Raise UserError for a group size or code width that cannot be packed, or that does not divide the head."""
    for width in bits:
        if not is_whole(width) or width not in widths:
            known = [f"bits={width}" for width in widths]
            raise UserError(f"bits={width} for {who}; type {', '.join(known[:-1])} or {known[-1]}")
    if not is_whole(group_size) or group_size < SMALLEST_GROUP or group_size % SMALLEST_GROUP:
        raise UserError(f"group={group_size} for {who}; type a multiple of {SMALLEST_GROUP}, for example group=32")
    if head_dim is not None and head_dim % group_size:
        fitting = [g for g in range(SMALLEST_GROUP, head_dim + 1, SMALLEST_GROUP) if head_dim % g == 0]
        choices = ", ".join(f"group={g}" for g in fitting)
        advice = f"type one of: {choices}" if fitting else f"no multiple of {SMALLEST_GROUP} does; choose another store"
        raise UserError(f"group={group_size} does not divide the head size {head_dim}; {advice}")
