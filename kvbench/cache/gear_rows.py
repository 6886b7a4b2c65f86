"""Blocks of tokens as codes, a low rank of what the codes miss, and outliers held apart: GEAR's keys and values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.groups import Groups, planned_groups
from kvbench.cache.residual import planned_residual
from kvbench.cache.slots import Buffer, SlotShape
from kvbench.kernels.parts import Axis, LowRank, Part, Sparse, Sum


@dataclass(frozen=True)
class GearSide:
    """How one side is held. axis: groups, and the lines that outliers are picked from, run along tokens of a channel or
    along channels of a token. block: tokens that are held together. outliers: share of a line's numbers.
    """

    axis: Axis
    bits: int
    group_size: int
    block: int
    rank: int
    outliers: float

    def picked(self, width: int) -> int:
        """Outliers at each end of a line."""
        return int(self.outliers * (self.block if self.axis == "token" else width) / 2)

    def planned_bytes(self, width: int, shape: SlotShape) -> int:
        """Bytes of the buffers, by formula."""
        blocks, heads = shape.slots // self.block, shape.batch * shape.kv_heads
        lines = width if self.axis == "token" else self.block
        one = self.rank * (self.block + width) * 2 + lines * 2 * self.picked(width) * 4
        codes = planned_groups(self.bits, self.group_size, blocks * self.block, width, shape)
        return codes + heads * blocks * one + planned_residual(self.block, width, shape)


class GearBlocks:
    """Whole blocks of keys or of values, as they leave the residual.

    codes: of the numbers, with the mean of its line in the place of an outlier. left [B, Hkv, blocks, block, r], right
    [B, Hkv, blocks, r, D], float16: the r leading directions of what the codes miss. delta float16 and place int16
    [B, Hkv, blocks, lines, 2 x picked]: outliers less what codes and directions give, and where in the line.
    """

    def __init__(self, side: GearSide, width: int, shape: SlotShape) -> None:
        self.side, self.width = side, width
        blocks, lead = shape.slots // side.block, (shape.batch, shape.kv_heads)
        self.codes = Groups(side.axis, side.bits, side.group_size, blocks * side.block, width, shape)
        lines = (width if side.axis == "token" else side.block), 2 * side.picked(width)
        half, device = torch.float16, shape.device
        self.left = torch.empty(*lead, blocks, side.block, side.rank, dtype=half, device=device)
        self.right = torch.empty(*lead, blocks, side.rank, width, dtype=half, device=device)
        self.delta = torch.empty(*lead, blocks, *lines, dtype=half, device=device)
        self.place = torch.empty(*lead, blocks, *lines, dtype=torch.int16, device=device)

    @property
    def length(self) -> int:
        """Rows held."""
        return self.codes.length

    def append(self, rows: Tensor) -> None:
        """Hold whole blocks of rows [B, Hkv, n, D] behind those held."""
        size, rank, first = self.side.block, self.side.rank, self.codes.length // self.side.block
        new = slice(first, first + rows.shape[2] // size)
        if new.start == new.stop:
            return
        exact = rows.float().unflatten(2, (-1, size))  # [B, Hkv, blocks, block, D]
        lines = exact.mT if self.side.axis == "token" else exact
        place = ends(lines, self.side.picked(self.width))
        calm = lines.scatter(-1, place, lines.mean(-1, keepdim=True).expand_as(place))
        inside = calm.mT if self.side.axis == "token" else calm
        self.codes.append(inside.flatten(2, 3).to(rows.dtype))
        coded = self.codes.parts()[0].read(torch.float32)[:, :, first * size :]
        missed = inside - coded.unflatten(2, (-1, size))
        if rank:
            _, vectors = torch.linalg.eigh(missed.mT.double() @ missed.double())
            right = vectors[..., -rank:].mT.to(torch.float16)
            self.left[:, :, new], self.right[:, :, new] = missed @ right.mT.float(), right
            missed = missed - self.left[:, :, new].float() @ right.float()
        read = inside - missed
        given = read.mT if self.side.axis == "token" else read
        self.delta[:, :, new] = (lines - given).gather(-1, place)
        self.place[:, :, new] = place

    def parts(self) -> Sequence[Part]:
        """The encoded rows: codes alone where no direction and no outlier is held."""
        blocks, added = self.codes.length // self.side.block, list[LowRank | Sparse]()
        if self.side.rank:
            added.append(LowRank(self.left[:, :, :blocks], self.right[:, :, :blocks]))
        if self.delta.shape[-1]:
            size = self.side.block if self.side.axis == "token" else self.width
            added.append(Sparse(self.delta[:, :, :blocks], self.place[:, :, :blocks], size, self.side.axis))
        return [Sum(codes, tuple(added)) if added else codes for codes in self.codes.parts()]

    def buffers(self) -> Iterator[Buffer]:
        yield from self.codes.buffers()
        used = self.codes.length / self.codes.capacity if self.codes.capacity else 1.0
        yield Buffer("basis", self.left, used)
        yield Buffer("basis", self.right, used)
        yield Buffer("outliers", self.delta, used)
        yield Buffer("outliers", self.place, used)


def ends(lines: Tensor, count: int) -> Tensor:
    """Where the `count` smallest and the `count` largest numbers of each line [..., n] are: int64 [..., 2 x count]."""
    order = lines.sort(dim=-1, stable=True).indices
    return torch.cat([order[..., :count], order[..., order.shape[-1] - count :]], dim=-1)
