"""Shared by the GPU scripts: timing of calls, and the read bandwidth of the memory."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvbench.cache.graph import CudaGraph

Call = Callable[[], object]

SAMPLE_SECONDS = 0.02
"""A sample repeats its calls for at least this long, or the clock's steps and the launch would show."""

SAMPLES = 7


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all GPU scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda", help="cuda, or cpu to see with --tiny that the script runs")
    made.add_argument("--tiny", action="store_true", help="sizes that a CPU gets through in seconds")
    made.add_argument("--out", type=Path, help="write the rows to this JSON file too, after every cell")
    return made


def device_of(arguments: argparse.Namespace) -> torch.device:
    """The device asked for. Exits with 2 where there is none."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no NVIDIA GPU; type --device cpu --tiny to see that the script runs")
    return torch.device(arguments.device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def l2_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache; 1 MB on a CPU, where no conclusions are drawn."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**20


def copies(bytes_read: int, device: torch.device) -> int:
    """Distinct caches to be read in turn: together at least four times the L2."""
    return max(1, -(-4 * l2_bytes(device) // bytes_read))


def seconds(calls: Sequence[Call], device: torch.device) -> float:
    """Median seconds of one call, the calls taking turns; on CUDA as one graph, without the launches."""

    def all_calls() -> None:
        for call in calls:
            call()

    repeat: Call = CudaGraph(all_calls, warm_up=1) if device.type == "cuda" else all_calls
    repeat()  # compiles
    repeat()  # captures
    once = elapsed(repeat, 1, device)
    count = max(1, round(SAMPLE_SECONDS / max(once, 1e-6))) if device.type == "cuda" else 1
    samples = [elapsed(repeat, count, device) / count for _ in range(SAMPLES if device.type == "cuda" else 2)]
    return statistics.median(samples) / len(calls)


def elapsed(work: Call, count: int, device: torch.device) -> float:
    """Seconds that `count` runs take on the device."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def read_bandwidth(device: torch.device) -> float:
    """Read bandwidth of the memory in bytes per second: the fastest of several ways to only read it."""
    size = max(2**22, 80 * l2_bytes(device))
    memory = torch.ones(size // 4, device=device)
    ways: list[Call] = [lambda: memory.sum(), lambda: memory.view(torch.int32).amax()]
    if device.type == "cuda":
        from scripts.gpu_read import reader

        ways += [reader(memory, warps, block) for warps, block in ((4, 2048), (8, 4096), (8, 8192), (16, 16384))]
    return max(memory.nbytes / seconds([way], device) for way in ways)


def save(rows: list[dict[str, object]], out: Path | None, **facts: object) -> None:
    """Write rows and their machine to a file, atomically."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_suffix(".part")
    beside.write_text(json.dumps(facts | {"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    os.replace(beside, out)
