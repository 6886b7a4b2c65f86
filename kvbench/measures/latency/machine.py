"""The machine while a timing was taken: load, clock rates and read bandwidth."""

import os
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache, partial

import torch

from kvbench.cache.record import clock
from kvbench.kernels.compile import CannotCompile, load
from kvbench.measures.out_of_memory import is_out_of_memory
from kvbench.results import provenance

READ_BYTES = 2**29
"""More bytes than processor caches hold."""
PASSES = 4
SLOW_CLOCK = 0.8
"""Share of the highest clock below which a core counts as throttled."""
IDLE = 0x1
"""nvidia-smi's throttle bit of an idle GPU."""


@dataclass(frozen=True)
class Machine:
    """load: processes that want a core, the last minute's mean. clock_mhz: the slowest core's, or the GPU's.

    note: what makes timings of this moment doubtful, empty where nothing is known to.
    """

    load: float
    clock_mhz: float | None
    note: str


def machine_now(device: torch.device) -> Machine:
    """The state at this moment."""
    load_average = os.getloadavg()[0]
    if device.type == "cuda":
        return _gpu_now(device, load_average)
    clocks = provenance.cpu_clock_mhz()
    if clocks is None:
        return Machine(load_average, None, "")
    limit = clocks.get("limit")
    slow = limit is not None and clocks["min"] < SLOW_CLOCK * limit
    return Machine(load_average, clocks["min"], f"throttled: a core at {clocks['min']:.0f} MHz" if slow else "")


def _gpu_now(device: torch.device, load_average: float) -> Machine:
    # By UUID: CUDA and nvidia-smi may number the cards differently.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    gpu = next((gpu for gpu in provenance.gpus() if gpu["uuid"].removeprefix("GPU-") == uuid), {})
    mhz = gpu.get("clock_sm_mhz", "")
    reasons = gpu.get("throttle_reasons", "0x0")
    throttled = reasons.startswith("0x") and int(reasons, 16) & ~IDLE != 0
    clock_mhz = float(mhz) if mhz.replace(".", "", 1).isdigit() else None
    return Machine(load_average, clock_mhz, f"throttled: nvidia-smi says {reasons}" if throttled else "")


def read_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that the device reads with the threads it has, measured once a process; None where the device
    has no memory left for it."""
    return _read_bandwidth(device, torch.get_num_threads())


@cache
def _read_bandwidth(device: torch.device, threads: int) -> float | None:
    try:
        memory = torch.ones(READ_BYTES // 4, device=device)
    except (MemoryError, RuntimeError) as error:  # torch's own out-of-memory is a RuntimeError
        if not is_out_of_memory(error):
            raise
        return None
    read: Callable[[], object] = memory.sum
    if device.type == "cpu":
        with suppress(CannotCompile):  # without a compiler torch sums, more slowly
            function = load().kvbench_read
            function.argtypes, function.restype = (c_void_p, c_int64, c_int64), c_float
            read = partial(function, memory.data_ptr(), memory.numel(), threads)
    best = float("inf")
    for _ in range(PASSES):
        started = clock(device)
        read()
        best = min(best, clock(device) - started)
    return READ_BYTES / best


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters that a step reads: shared ones once, an embedding only where it is the output head."""
    found = {id(parameter): parameter for parameter in model.parameters()}
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not embedding:
        found.pop(id(embedding), None)  # a step looks up one row a token
    return sum(parameter.numel() * parameter.element_size() for parameter in found.values())
