"""Stand-ins for a CUDA graph where there is no GPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Tape(TorchDispatchMode):
    """Records the operations that run inside the block, and runs them again as a replay does: the same operations on
    the same memory with the same numbers from the host, and no Python of whoever queued them.

    What the operations make themselves is made anew; everything else is the tensor that was there at the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self, result: Tensor | None = None) -> Tensor | None:
        """Run the tape; the tensor that stands for `result` of the recording."""
        made: dict[int, Tensor] = {}

        def now(tensor: Tensor) -> Tensor:
            return made.get(id(tensor), tensor)

        for func, args, kwargs, out in self.calls:
            args, kwargs = tree_map_only(Tensor, now, (args, kwargs))
            new = func(*args, **kwargs)
            for old, fresh in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor):
                    made[id(old)] = fresh
        self.made = made
        return None if result is None else now(result)


class TapeRecorder:
    """A recorder for `GraphDecoder`: plain runs, then one that is taped, then replays of the tape."""

    def __init__(self, work: Callable[[], Tensor | None], warm_up: int) -> None:
        self.work, self.plain = work, warm_up
        self.tape: Tape | None = None

    def __call__(self) -> Tensor | None:
        if self.plain:
            self.plain -= 1
            return self.work()
        if self.tape is not None:
            return self.tape.replay(self.result)
        self.tape = Tape()
        with self.tape:
            self.result = self.work()
        return self.result


def is_written(tensor: Tensor) -> bool:
    """Whether a tensor has memory for each of its elements, as everything has that a step writes to."""
    return all(stride > 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class TapedGraph(Tape):
    """A tape that keeps the promises of a CUDA graph: recording changes nothing in `state`, and a replay puts its
    results where those of the recording are."""

    def __init__(self, state: list[Tensor]) -> None:
        super().__init__()
        self.state = [tensor for tensor in state if is_written(tensor)]

    def __enter__(self) -> TapedGraph:
        self.before = [tensor.clone() for tensor in self.state]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, old in zip(self.state, self.before, strict=True):
            tensor.copy_(old)

    @torch.inference_mode()
    def replay(self, result: Tensor | None = None) -> Tensor | None:
        super().replay()
        for _, _, _, out in self.calls:
            for old in tree_leaves(out):
                if isinstance(old, Tensor) and self.made[id(old)] is not old and is_written(old):
                    old.copy_(self.made[id(old)])
        return None


class OneDevice(TorchDispatchMode):
    """Notes every operation that touches another device than "meta": a copy from or to the host, or a wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.strays: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type != "meta" for tensor in tensors):
            self.strays.append(str(func))
        return out


def on_meta(thing: Any) -> Any:
    """A copy of an object with all its tensors on the device "meta", which has no numbers to be read by the host."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, map_location="meta", weights_only=False)
