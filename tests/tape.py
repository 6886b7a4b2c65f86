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
        return None if result is None else now(result)


class TapeRecorder:
    """A recorder for `kvbench.graph.GraphDecoder`: plain runs, then one that is taped, then replays of the tape."""

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
