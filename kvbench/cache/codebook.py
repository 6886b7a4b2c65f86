"""Preallocated rows as codes of a codebook: the memory of TurboQuant's store."""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from kvbench.cache.slots import Buffer, SlotShape, scatter_rows
from kvbench.kernels.parts import Coded
from kvbench.kernels.quantise import pack

HALF = torch.finfo(torch.float16).max


class CodedRows:
    """Rows of D numbers as codes of a normal codebook and a float16 norm each; the shapes are `Coded`'s.

    keeps_norm: choose the held number so that a row that is read has the exact norm of the row that was written, and
    not the least squared error. length: rows held.
    """

    def __init__(self, bits: int, width: int, shape: SlotShape, keeps_norm: bool = False) -> None:
        self.keeps_norm = keeps_norm
        self.bits, self.group_size, self.length = bits, packed_together(width), 0
        lead = (shape.batch, shape.kv_heads, shape.slots)
        lane = self.group_size * bits // 8
        self.codes = torch.empty(*lead, width // self.group_size, lane, dtype=torch.uint8, device=shape.device)
        self.norm = torch.empty(*lead, dtype=torch.float16, device=shape.device)
        self.levels = torch.tensor(lloyd_max(bits), dtype=torch.float32, device=shape.device)
        self.borders = (self.levels[1:] + self.levels[:-1]) / 2

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and norms of rows [B, Hkv, n, D]."""
        exact = rows.to(torch.float32)
        size = exact.square().mean(-1, keepdim=True).sqrt().clamp(max=HALF)
        codes = torch.bucketize(exact / size.clamp(min=torch.finfo(torch.float32).tiny), self.borders, out_int32=True)
        if self.keeps_norm:
            size = (size / self.levels[codes].square().mean(-1, keepdim=True).sqrt()).clamp(max=HALF)
        packed = pack(codes.to(torch.uint8).unflatten(-1, (-1, self.group_size)), self.bits)
        return packed, size.squeeze(-1).to(torch.float16)

    def append(self, rows: Tensor) -> None:
        """Encode rows [B, Hkv, n, D] behind those held."""
        codes, norm = self.encode(rows)
        stop = self.length + rows.shape[2]
        self.codes[:, :, self.length : stop], self.norm[:, :, self.length : stop] = codes, norm
        self.length = stop

    def overwrite(self, slot: Tensor, rows: Tensor) -> None:
        """Encode rows [B, Hkv, q, D] into the slots [B, Hkv, q]."""
        codes, norm = self.encode(rows)
        scatter_rows(self.codes, slot, codes)
        scatter_rows(self.norm, slot, norm)

    def whole(self) -> Coded:
        """All rows, held or not."""
        return Coded(self.codes, self.norm, self.levels, self.bits, self.group_size)

    def parts(self) -> list[Coded]:
        """The rows held, as one part."""
        return [self.whole().first(self.length)]

    def buffers(self, kept: int) -> Iterator[Buffer]:
        """Codes and norms, with the share in use when `kept` rows count, and the codebook, always in use."""
        yield Buffer("codes", self.codes, kept / self.codes.shape[2])
        yield Buffer("scales", self.norm, kept / self.norm.shape[2])
        yield Buffer("scales", self.levels, 1.0)
        yield Buffer("scales", self.borders, 1.0)


def codebook_bytes(bits: int) -> int:
    """Bytes of the 2^bits levels and of the borders between them, in float32."""
    levels = 1 << bits
    return 4 * (levels + levels - 1)


def packed_together(width: int) -> int:
    """Channels whose codes are packed together: 32, or fewer where a head has no multiple of that."""
    return math.gcd(width, 32)


@lru_cache(maxsize=4)
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits levels with the smallest mean squared error for a standard normal (Lloyd, 1957; Max, 1960).

    At the optimum each level is the mean of the numbers nearest to it, of those between a and b
    (pdf(a) - pdf(b)) / (cdf(b) - cdf(a)); iterated until nothing moves.
    """
    normal, count = NormalDist(), 2**bits
    levels = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    moved = 1.0
    while moved > 1e-12:
        borders = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        pdf, cdf = [normal.pdf(x) for x in borders], [normal.cdf(x) for x in borders]
        better = [(pdf[i] - pdf[i + 1]) / (cdf[i + 1] - cdf[i]) for i in range(count)]
        moved = max(abs(a - b) for a, b in zip(levels, better, strict=True))
        levels = better
    return tuple(levels)
