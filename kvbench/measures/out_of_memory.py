"""Running out of memory: recognising it, releasing memory, and trying the next fallback."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

NO_HOST_MEMORY = "can't allocate memory"
"""What torch's CPU allocator says, in a plain RuntimeError."""

F = TypeVar("F")
T = TypeVar("T")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_HOST_MEMORY in str(error)


def give_memory_back() -> None:
    """Collect what nothing refers to; on a GPU, return torch's unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fits_in_memory(work: Callable[[], None]) -> bool:
    """Run work(); False where it ran out of memory, which is then released. Other errors pass through."""
    try:
        work()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    give_memory_back()  # outside the handler, where nothing refers to the failed frames
    return False


def with_fallback(
    fallbacks: Sequence[F], work: Callable[[F], None], on_retry: Callable[[F], None] = lambda fallback: None
) -> F:
    """work(fallback) for one fallback after the other until memory suffices; returns the one that did.

    on_retry: called with the next fallback before it is tried. Raises what the last one raises.
    """
    for fallback, following in pairwise(fallbacks):
        if fits_in_memory(lambda fallback=fallback: work(fallback)):  # type: ignore[misc]
            return fallback
        on_retry(following)
    work(fallbacks[-1])
    return fallbacks[-1]
