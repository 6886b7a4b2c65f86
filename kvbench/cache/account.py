"""Bytes really held: unique storages, never shapes times item sizes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbench.cache.store import Buffer


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
