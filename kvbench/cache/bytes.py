"""Bytes that are held: the sizes of distinct storages, not shapes times item sizes."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kvbench.cache.slots import Buffer


@dataclass
class Held:
    """held: all bytes. slack: those of slots that hold no token now. parts: bytes by what they are for."""

    held: int = 0
    slack: int = 0
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """Bytes in use by kept tokens and their bookkeeping."""
        return self.held - self.slack


def held_bytes(buffers: Iterable[Buffer]) -> Held:
    """Sum over distinct storages. A view that keeps a larger storage alive counts with all of it."""
    total, seen = Held(), set()
    for part, tensor, used in buffers:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() == 0:
            continue
        seen.add(storage.data_ptr())
        total.held += storage.nbytes()
        total.slack += storage.nbytes() - round(used * min(storage.nbytes(), tensor.numel() * tensor.element_size()))
        total.parts[part] = total.parts.get(part, 0) + storage.nbytes()
    return total


def allocator_bytes(buffers: Iterable[Buffer]) -> int | None:
    """Bytes that the allocator has reserved for the same storages; None where it cannot be asked.

    On CUDA the sizes of torch's blocks, on a CPU what malloc_usable_size says.
    """
    addresses = {tensor.untyped_storage().data_ptr(): tensor.device for _, tensor, _ in buffers if tensor.numel()}
    if any(device.type == "cuda" for device in addresses.values()):
        blocks = {
            block["address"]: block["size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        return sum(blocks[address] for address in addresses) if addresses.keys() <= blocks.keys() else None
    try:
        usable = ctypes.CDLL(None).malloc_usable_size
    except (OSError, AttributeError):  # not glibc
        return None
    usable.argtypes, usable.restype = (ctypes.c_void_p,), ctypes.c_size_t
    return sum(int(usable(address)) for address in addresses)
