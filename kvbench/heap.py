"""Memory that the C library keeps after it was freed; nothing is done where the C library is not glibc."""

import ctypes
from contextlib import suppress

M_MMAP_THRESHOLD = -3
LARGE = 2**18
"""Bytes from which a freed block goes back to the system at once, after `give_back_large_blocks_at_once`."""


def give_back_freed_memory() -> None:
    """Return freed memory to the system: else it stays, and is reused in part only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_large_blocks_at_once() -> None:
    """From now on the process holds no freed block of LARGE bytes or more, so its size is that of live tensors.

    Every such block then costs page faults, so this is for processes that measure memory.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
