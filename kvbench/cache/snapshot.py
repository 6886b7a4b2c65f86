"""A cache at one moment, to go back to: ask several questions of one compressed prompt, one after the other."""

from collections.abc import Iterable
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

UNCHANGING = (nn.Module, ModuleType, FunctionType, MethodType, BuiltinFunctionType, type, str, bytes, int, float)
"""Kinds of values that no forward of a cache changes."""


class Snapshot:
    """Everything that a forward may change in `root`: its tensors, counters, lists and dicts, at any depth.

    Frozen dataclasses (keep rules, stores, plans), the objects that they name and modules never change and are left
    alone. Objects of stores and layers that are not part of kvbench need no code of their own.

    copies: whether tensors are copied and written back into the same memory, so that addresses stay. False: only
    references are kept, for caches that replace their tensors and never write into them.
    """

    def __init__(self, root: object, copies: bool = True) -> None:
        self.root, self.copies = root, copies
        self._known: set[int] = set()
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._objects: list[tuple[object, dict[str, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._save(root)

    def put_back(self) -> None:
        """Make `root` what it was. A snapshot can be put back any number of times."""
        for tensor, copy in self._tensors:
            tensor.copy_(copy)
        for holder, attributes in self._objects:
            vars(holder).clear()
            vars(holder).update(attributes)
        for several, items in self._lists:
            several[:] = items
        for named, entries in self._dicts:
            named.clear()
            named.update(entries)

    def _save(self, value: Any) -> None:
        if value is None or isinstance(value, UNCHANGING) or id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, Tensor):
            if self.copies:
                own = without_repeats(value)
                self._tensors.append((own, own.clone()))
        elif isinstance(value, list):
            self._lists.append((value, list(value)))
            self._save_all(value)
        elif isinstance(value, dict):
            self._dicts.append((value, dict(value)))
            self._save_all(value.values())
        elif isinstance(value, tuple):
            self._save_all(value)
        elif is_frozen(value):
            self._known |= {id(part) for part in vars(value).values()}
        elif hasattr(value, "__dict__"):
            attributes = dict(vars(value))
            self._objects.append((value, attributes))
            for part in attributes.values():  # first, because the layer names the plan's kernel as well
                if is_frozen(part):
                    self._save(part)
            self._save_all(attributes.values())

    def _save_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._save(value)


def is_frozen(value: object) -> bool:
    """Whether a value is an instance of a frozen dataclass."""
    return is_dataclass(value) and bool(getattr(value, "__dataclass_params__").frozen)  # noqa: B009  not in its stub


def without_repeats(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that lie in memory once each: of an expanded one a view of what was expanded."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
