"""Attention over stored keys and values: the parts a store is made of, and the kernels that read them.

`choose` picks the kernel that decode attention runs on.
"""

import os
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.kernels import reference
from kvbench.kernels.compile import CannotCompile, load
from kvbench.kernels.cpu import CpuKernel
from kvbench.kernels.options import NO_OPTIONS, AttendOptions
from kvbench.kernels.parts import Parts
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_decode import TritonKernel, available

KERNELS = ("auto", "reference", "cpu", "triton")


class Kernel(Protocol):
    """Decode attention; `kvbench.kernels.reference.attend` defines what it computes."""

    @property
    def name(self) -> str:
        """What the rows' `kernel` column says."""

    def attend(
        self, query: Tensor, keys: Parts, values: Parts, scoring: Scoring, options: AttendOptions = NO_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """Output and probabilities; the latter may be None unless they are wanted. `lengths` need a `LengthsKernel`."""

    def refusal(self, query: Tensor, keys: Parts, values: Parts) -> str | None:
        """Why `attend` passes such tensors to the reference; None if the kernel takes them."""


@runtime_checkable
class LengthsKernel(Kernel, Protocol):
    """A kernel that reads on the device how many slots of a buffer are filled, so its calls can be captured in a CUDA
    graph."""

    def refuses_lengths(self, query: Tensor, keys: Parts, values: Parts, n_sink: int) -> str | None:
        """Why `attend` cannot take `lengths` for whole buffers like these; None where it can."""


class ReferenceKernel:
    """The reference implementation in plain torch, as a kernel.

    reason: why no faster kernel was chosen; empty where the reference was asked for.
    """

    name = reference.NAME

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def attend(
        self, query: Tensor, keys: Parts, values: Parts, scoring: Scoring, options: AttendOptions = NO_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """See `kvbench.kernels.reference.attend`."""
        return reference.attend(query, keys, values, scoring, options)

    def refuses_lengths(self, query: Tensor, keys: Parts, values: Parts, n_sink: int) -> str | None:
        """None: the reference takes all of them."""
        return None

    def refusal(self, query: Tensor, keys: Parts, values: Parts) -> str | None:
        """None: the reference takes all tensors."""
        return None


REFERENCE = ReferenceKernel()


def choose(device: torch.device, dtype: torch.dtype = torch.float32, wanted: str = "auto") -> Kernel:
    """The kernel for caches on `device` with queries of `dtype`.

    Args:
        wanted: "auto", the compiled kernel on a CPU, the Triton kernel on an NVIDIA GPU, else the reference;
            "reference"; "cpu", the compiled kernel; "triton", the one for NVIDIA GPUs (scripts/check_triton.py checks
            it on a device). The environment's `KVBENCH_KERNEL` replaces "auto"; where that kernel cannot run, the
            reference is used.

    Raises UserError for an unknown name, and where the kernel that the argument names cannot run here.
    """
    preferred = os.environ.get("KVBENCH_KERNEL") or "auto" if wanted == "auto" else wanted
    if preferred not in KERNELS:
        raise UserError(f"kernel={preferred} is unknown; type {', '.join(f'kernel={name}' for name in KERNELS)}")
    if preferred == "reference":
        return REFERENCE
    on_device = preferred == "triton" or (preferred == "auto" and device.type == "cuda")
    kernel = on_gpu(device, dtype) if on_device else on_cpu(device, dtype)
    if not isinstance(kernel, str):
        return kernel
    if wanted in ("cpu", "triton"):
        raise UserError(f"kernel={wanted} cannot be had: {kernel}; type kernel=reference")
    return ReferenceKernel(kernel)


def on_cpu(device: torch.device, dtype: torch.dtype) -> Kernel | str:
    """The compiled kernel, or why it cannot be used for caches on `device` with queries of `dtype`."""
    if device.type != "cpu":
        return f"the compiled kernel runs on the CPU, not on {device.type}"
    return "the compiled kernel computes in float32, and the model in float64" if dtype == torch.float64 else compiled()


def on_gpu(device: torch.device, dtype: torch.dtype) -> Kernel | str:
    """The Triton kernel, or why there is none for caches on `device` with queries of `dtype`."""
    if device.type != "cuda":
        return f"the Triton kernel runs on NVIDIA GPUs, not on {device.type}"
    if dtype == torch.float64:
        return "the Triton kernel computes in float32, and the model in float64"
    possible, reason = available()
    return TritonKernel() if possible else reason


@cache
def compiled() -> CpuKernel | str:
    """The compiled kernel, or why there is none. The answer is cached for the process."""
    try:
        return CpuKernel(load())
    except CannotCompile as error:
        return str(error)
