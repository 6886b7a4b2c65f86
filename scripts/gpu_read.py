"""A Triton kernel that only reads memory: the bandwidth that read-bound kernels are compared with."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def read(memory, out, length, BLOCK: tl.constexpr):
    """Every program reads blocks in turn with all others and keeps one number. length: a multiple of BLOCK."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, length, stride, num_stages=3):
        total += tl.load(memory + start + lane)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def reader(memory: torch.Tensor, warps: int, block: int) -> Callable[[], object]:
    """A call that reads float32 `memory` once, as far as whole blocks go."""
    programs = torch.cuda.get_device_properties(memory.device).multi_processor_count * 64 // warps
    out = torch.empty(programs, device=memory.device)
    length = memory.numel() // block * block
    return lambda: read[(programs,)](memory, out, length, BLOCK=block, num_warps=warps)
