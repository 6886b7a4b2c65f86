"""Decode attention by the compiled CPU kernel, `decode.cpp`: same arguments and results as the reference.

Calls that the kernel does not take (`kvbench.kernels.cpu_parts`), and float64, go to the reference.
"""

import ctypes
from array import array

import torch
from torch import Tensor

from kvbench.kernels import reference
from kvbench.kernels.cpu_parts import NOTHING, last_channels, pack_parts
from kvbench.kernels.options import NO_OPTIONS, AttendOptions
from kvbench.kernels.parts import Narrow, Paged, Parts, Sum, head_dim
from kvbench.kernels.prefill import Scoring

NAME = "cpu-c++"


class CpuKernel:
    """decode.cpp behind the reference's signature.

    library: what `kvbench.kernels.compile.load` returns.
    """

    name = NAME

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.kvbench_attend
        self._attend.argtypes = (ctypes.c_void_p, ctypes.c_double, ctypes.c_double)
        self._attend.restype = None
        self._encode = library.kvbench_encode
        self._encode.argtypes, self._encode.restype = (ctypes.c_void_p,), None

    def encode(self, groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """`quantise` and `pack`, bit for bit: float32 groups [B, Hkv, n, g, G] with any strides.

        Returns codes uint8 [B, Hkv, n, g, G * bits / 8], scale and minimum float16 [B, Hkv, n, g].
        """
        lead, size = groups.shape[:4], groups.shape[4]
        codes = torch.empty(*lead, size * bits // 8, dtype=torch.uint8)
        scale, minimum = torch.empty(2, *lead, dtype=torch.float16)
        numbers = array(
            "q",
            (
                *lead,
                size,
                bits,
                *groups.stride(),
                groups.data_ptr(),
                codes.data_ptr(),
                scale.data_ptr(),
                minimum.data_ptr(),
            ),
        )
        self._encode(numbers.buffer_info()[0])
        return codes, scale, minimum

    def refusal(self, query: Tensor, keys: Parts, values: Parts) -> str | None:
        """Why the kernel does not take such tensors; None where it takes them."""
        if pack_parts(query, keys, values) is not None:
            return None
        if any(isinstance(part, Narrow) for part in (*keys, *values)):
            return "the compiled kernel does not read rows that hold some of their channels"
        if any(isinstance(part, Sum) for part in (*keys, *values)):
            return "the compiled kernel does not read rows that are a sum of several parts"
        return "the compiled kernel does not take heads of this size in this store"

    def attend(
        self, query: Tensor, keys: Parts, values: Parts, scoring: Scoring, options: AttendOptions = NO_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """See `kvbench.kernels.reference.attend`; probabilities are None where they are not wanted."""
        parts, apart = pack_parts(query, keys, values), last_channels(keys)
        visible, sink_query, n_sink = options.visible, options.sink_query, options.n_sink
        if parts is None or (apart and n_sink) or options.lengths is not None:
            return reference.attend(query, keys, values, scoring, options)
        batch, heads, tokens, channels = query.shape
        last_dim = head_dim(apart[0]) if apart else 0
        kv_heads, value_dim, slots = keys[0].kv_heads, head_dim(values[0]), sum(part.length for part in keys)
        group = heads // kv_heads

        queries = float_rows(query)
        sinks = None if sink_query is None or not n_sink else float_rows(sink_query)
        mask = None if visible is None else byte_rows(visible.expand(batch, kv_heads, tokens, slots))
        logits = None if scoring.sink_logits is None else scoring.sink_logits.to(torch.float32).contiguous()
        lengths = keys[0].lengths if isinstance(keys[0], Paged) else None
        lengths = None if lengths is None else lengths.contiguous()
        output = torch.empty(batch, heads, tokens, value_dim)
        probabilities = torch.empty(batch, kv_heads, group, tokens, slots) if options.want_probabilities else None
        call = array(
            "q",
            (
                batch,
                kv_heads,
                group,
                tokens,
                channels - last_dim,
                value_dim,
                slots,
                torch.get_num_threads(),
                len(keys),
                len(values),
                last_dim,
                len(apart),
                *where(queries),
                *where(sinks),
                n_sink if sinks is not None else 0,
                pointer(logits),
                *where(mask),
                pointer(lengths),
                output.data_ptr(),
                pointer(probabilities),
                *parts,
            ),
        )
        self._attend(call.buffer_info()[0], scoring.scaling, scoring.softcap or 0.0)
        return output if query.dtype == torch.float32 else output.to(query.dtype), probabilities


def float_rows(query: Tensor) -> Tensor:
    """float32 queries whose channels are adjacent in memory."""
    query = query.to(torch.float32)
    return query if query.stride(-1) == 1 else query.contiguous()


def byte_rows(mask: Tensor) -> Tensor:
    """A mask whose slots are adjacent in memory; other dimensions may have stride 0."""
    return mask if mask.stride(-1) == 1 else mask.contiguous()


def where(tensor: Tensor | None) -> tuple[int, ...]:
    """Address and leading three strides of a tensor with four dimensions."""
    return NOTHING if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


def pointer(tensor: Tensor | None) -> int:
    """Address of a tensor, 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()
