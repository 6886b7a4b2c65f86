"""Memory that the C library keeps after it was freed."""

import ctypes
from contextlib import suppress


def give_back_freed_memory() -> None:
    """Return freed memory to the system, where the C library is glibc: else it stays and is reused in part only."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
