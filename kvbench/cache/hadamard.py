"""The orthogonal Hadamard rotation of the last dimension, in blocks where its size is not a power of two."""

from functools import lru_cache

import torch
from torch import Tensor


def hadamard(x: Tensor, most: int | None = None) -> Tensor:
    """x [..., D] times a symmetric orthogonal matrix: Sylvester's, over sqrt(its size).

    Blockwise by the largest power of two, at most `most`, that divides D (80: blocks of 16, 96: 32). In float32, or
    float64 for float64 input; the result has the input's dtype.
    """
    size = x.shape[-1] & -x.shape[-1]
    size = size if most is None else min(size, most)
    if size == 0:  # a head without channels
        return x
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = exact.unflatten(-1, (-1, size)) @ _matrix(size, exact.dtype, exact.device)
    turned: Tensor = blocks.flatten(-2).to(x.dtype)
    return turned


@lru_cache(maxsize=16)
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / size**0.5
    return scaled.to(device, dtype)
