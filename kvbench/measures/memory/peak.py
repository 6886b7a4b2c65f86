"""Peak memory of a block of work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbench.background import repeating
from kvbench.heap import give_back_freed_memory


@dataclass
class Peak:
    """Highest bytes during a phase above those at its start, and how they were measured."""

    bytes: int = 0
    source: str = ""


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Highest memory inside the block above its start.

    On a GPU the allocator's count. On a CPU the process's VmHWM, reset through /proc/self/clear_refs; where that
    cannot be written, the resident size sampled every 2 ms, which can miss short peaks.
    """
    found = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        torch.cuda.synchronize(device)
        found.bytes, found.source = torch.cuda.max_memory_allocated(device) - before, "CUDA allocator"
        return
    give_back_freed_memory()  # its reuse would not show in the peak
    if _reset_high_water_mark():
        before = _status_bytes("VmRSS")
        yield found
        found.bytes, found.source = max(0, _status_bytes("VmHWM") - before), "VmHWM of the process"
        return
    with _sampled(found):
        yield found


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


@contextmanager
def _sampled(found: Peak) -> Iterator[None]:
    before = highest = _resident_bytes()

    def sample() -> None:
        nonlocal highest
        highest = max(highest, _resident_bytes())

    try:
        with repeating(sample, 0.002):
            yield
    finally:
        found.bytes, found.source = max(0, highest - before), "resident size, sampled every 2 ms"


def _resident_bytes() -> int:
    import psutil  # type: ignore[import-untyped]

    return int(psutil.Process().memory_info().rss)
