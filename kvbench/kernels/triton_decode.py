"""Decode attention by the Triton kernels, for NVIDIA GPUs: same arguments and results as the reference.

Two launches: `decode` divides the slots among many small programs, `combine` adds up their results. Nothing is
unpacked, copied or made contiguous, and nothing waits for the device. With `lengths` on the device the launches do
not depend on how many slots are filled, so a CUDA graph of them can be replayed while the store fills.

Calls that the kernels do not take (see `refusal`) go to the reference.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from kvbench.kernels import reference
from kvbench.kernels.options import NO_OPTIONS, AttendOptions
from kvbench.kernels.parts import Packed, Parts, head_dim
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_pieces import FLOATS, Work, refused, sections_of, side_of, sinks_fit
from kvbench.kernels.triton_plan import plan

NAME = "triton"

LARGEST_HEAD = 256


def available() -> tuple[bool, str]:
    """Whether the kernels can run here, and if not, why."""
    if find_spec("triton") is None:
        return False, "triton is not installed; type pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, ""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False, "there is no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return False, f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
    return True, ""


def refusal(query: Tensor, keys: Parts, values: Parts) -> str | None:
    """Why the kernels do not take these tensors; None where they take them."""
    if query.dtype not in FLOATS:
        return f"queries of {query.dtype}"
    if not keys or not values:
        return "a store without a single slot"
    for part in (*keys, *values):
        if (reason := refused(part)) is not None:
            return reason
    if any(isinstance(part, Packed) and part.axis == "token" for part in values):
        return "values grouped along tokens"
    if max(head_dim(keys[0]), head_dim(values[0])) > LARGEST_HEAD:
        return f"heads of more than {LARGEST_HEAD} channels"
    if side_of(keys) is None or side_of(values) is None:
        return "parts other than one packed part followed by a dense ring"
    return None


class TritonKernel:
    """The Triton kernels behind the reference's signature."""

    name = NAME

    def refusal(self, query: Tensor, keys: Parts, values: Parts) -> str | None:
        """Why the kernel does not take such tensors; None where it takes them."""
        reason = refusal(query, [p for p in keys if p.length], [p for p in values if p.length])
        return None if reason is None else f"the Triton kernel does not take {reason}"

    def attend(
        self, query: Tensor, keys: Parts, values: Parts, scoring: Scoring, options: AttendOptions = NO_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """See `kvbench.kernels.reference.attend`; probabilities are None where they are not wanted.

        With lengths packed keys reach at least as far as packed values, and sinks lie in the first part.

        Raises ValueError where lengths are given and the kernels do not take these parts.
        """
        sink_query, lengths = options.sink_query, options.lengths
        n_sink = 0 if sink_query is None else options.n_sink
        if lengths is not None and (refused := self.refuses_lengths(query, keys, values, n_sink)) is not None:
            raise ValueError(refused)
        keys, values = [p for p in keys if p.length], [p for p in values if p.length]
        key, value, reason = side_of(keys), side_of(values), refusal(query, keys, values)
        if key is None or value is None or reason is not None or not sinks_fit(n_sink, key, value):
            return reference.attend(query, keys, values, scoring, options)
        if lengths is not None and (lengths.dtype != torch.int32 or lengths.stride(-1) != 1):
            raise ValueError(f"lengths of {lengths.dtype} with stride {lengths.stride(-1)}; give int32, contiguous")
        sections = sections_of(key, value, by_pointer=lengths is not None)
        sink_query = sink_query.contiguous() if sink_query is not None and n_sink else None
        work = Work(query.contiguous(), key, value, sections, scoring, options.visible, sink_query, n_sink, lengths)
        launches, output, probabilities = plan(work, options.want_probabilities)
        with torch.cuda.device_of(query):
            for launch in launches:
                launch.run()
        return output, probabilities

    def refuses_lengths(self, query: Tensor, keys: Parts, values: Parts, n_sink: int) -> str | None:
        """Why `attend` cannot take `lengths` for whole buffers like these; None where it can."""
        keys, values = [p for p in keys if p.length], [p for p in values if p.length]
        key, value, reason = side_of(keys), side_of(values), refusal(query, keys, values)
        if key is None or value is None or reason is not None:
            return f"the Triton kernels do not take {reason}"
        return None if sinks_fit(n_sink, key, value) else "the Triton kernels want sinks in the first part"
