"""Memory layouts that the Triton kernels read: at most one packed piece, then at most one dense ring."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.parts import Coded, Dense, Narrow, Packed, Paged, Part, Split, Sum, head_dim, total_length
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.quantise import BITS

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

LARGEST_GROUP = 128

CHANNEL_BITS: tuple[int, ...] = (*BITS, 3)
"""Code widths of groups along channels; groups along tokens have `BITS`."""

LEVEL_BITS: tuple[int, ...] = (4, 3)
"""Code widths of a codebook."""


@dataclass(frozen=True)
class Side:
    """The keys or the values of a store.

    packed: the first slots. dense: a ring of `size` rows, or a plain buffer where size is None; the first slot after
    the packed ones is in row `start`. dense_length: number of dense slots. is_ring: whether `start` follows from the
    number of packed slots when that number is on the device.
    """

    packed: Packed | Coded | None
    dense: Tensor | None
    start: int
    size: int | None
    dense_length: int
    is_ring: bool = False

    @property
    def packed_length(self) -> int:
        return 0 if self.packed is None else self.packed.length

    @property
    def length(self) -> int:
        return self.packed_length + self.dense_length

    @property
    def by_token(self) -> bool:
        """Whether groups run along tokens."""
        return isinstance(self.packed, Packed) and self.packed.axis == "token"

    def pointers(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """Codes, scale (or norm), minimum and levels; tensors that the kernels read by 4-byte words are viewed so."""
        if self.packed is None:
            return None
        codes = self.packed.codes.view(torch.int32)
        if isinstance(self.packed, Coded):
            return codes, self.packed.norm, None, self.packed.levels
        scale, minimum = self.packed.scale, self.packed.minimum
        if self.by_token and minimum is not None:
            return codes, scale.view(torch.int32), minimum.view(torch.int32), None
        return codes, scale, minimum, None

    def strides(self) -> tuple[int, ...]:
        """Batch and head of codes, of pairs, and of rows, then slot of rows, in elements of `pointers`; 0 if absent."""
        pointers = self.pointers()
        packed = (0, 0, 0, 0) if pointers is None else (*pointers[0].stride()[:2], *pointers[1].stride()[:2])
        return (*packed, *((0, 0, 0) if self.dense is None else self.dense.stride()[:3]))


def side_of(parts: Sequence[Part]) -> Side | None:
    """The parts as one side; None unless they are packed rows followed by a ring of dense rows."""
    packed = parts[0] if parts and isinstance(parts[0], Packed | Coded) else None
    rings = [part.is_ring for part in parts if isinstance(part, Dense)]
    dense = [part.rows for part in parts if isinstance(part, Dense)]
    if len(dense) + (packed is not None) != len(parts) or len(dense) > 2 or total_length(parts) == 0:
        return None
    if not dense:
        return Side(packed, None, 0, None, 0)
    if len(dense) == 1:  # after packed rows it is a ring that does not wrap now
        n = dense[0].shape[2]
        return Side(packed, dense[0], 0, None if packed is None else n, n, rings[0])
    start = _ring_start(*dense)
    if start is None:
        return None
    return Side(packed, dense[1], start, start + dense[0].shape[2], dense[0].shape[2] + dense[1].shape[2])


def _ring_start(older: Tensor, newer: Tensor) -> int | None:
    """The row of a ring where `older` starts, if `newer` continues at the ring's row 0; else None."""
    row = newer.stride(2)
    if (older.dtype, older.stride()) != (newer.dtype, newer.stride()) or row == 0:
        return None
    if older.untyped_storage().data_ptr() != newer.untyped_storage().data_ptr():
        return None
    start, rest = divmod(int(older.storage_offset() - newer.storage_offset()), row)
    return start if rest == 0 and start >= newer.shape[2] else None


def is_readable_float8(rows: Tensor) -> bool:
    """Whether rows are e4m3 on a device that converts them: compute capability 8.9 or more, or the interpreter."""
    if rows.dtype != torch.float8_e4m3fn:
        return False
    return rows.device.type != "cuda" or torch.cuda.get_device_capability(rows.device) >= (8, 9)


def refused(part: Part) -> str | None:
    """Why the kernels cannot read a part; None where they can."""
    if isinstance(part, Split):
        return "rows whose channels are in two parts"
    if isinstance(part, Narrow):
        return "rows that hold some of their channels"
    if isinstance(part, Sum):
        return "rows that are a sum of several parts"
    if isinstance(part, Paged):
        return "blocks of a pool"
    if isinstance(part, Dense):
        if part.rows.dtype not in FLOATS and not is_readable_float8(part.rows):
            return f"rows of {part.rows.dtype}"
        return None if part.rows.stride(3) == 1 else "rows whose channels are not adjacent in memory"
    size, bits = part.group_size, part.bits
    widths = LEVEL_BITS if isinstance(part, Coded) else BITS if part.axis == "token" else CHANNEL_BITS
    if bits not in widths or size & (size - 1) or size > LARGEST_GROUP or size * bits % 32:
        return f"groups of {size} codes of {bits} bits"
    if isinstance(part, Coded):
        return _refused_codebook(part)
    if part.minimum is None:
        return "groups without a minimum"
    if part.axis == "token" and head_dim(part) % 2:
        return "an odd number of channels"
    inner = part.codes.shape[2:]
    if part.codes.stride()[2:] != (inner[1] * inner[2], inner[2], 1) or part.scale.stride()[2:] != (inner[1], 1):
        return "codes or pairs that are not contiguous within a head"
    if part.scale.dtype != torch.float16 or part.minimum.dtype != torch.float16:
        return f"pairs of {part.scale.dtype}"
    if part.minimum.stride() != part.scale.stride():
        return "scales and minima with different strides"
    pair = 2 if part.axis == "token" else 1  # these are read two at a time
    whole = (part.codes, 4), (part.scale, pair), (part.minimum, pair)
    if any(offset % unit for tensor, unit in whole for offset in (tensor.storage_offset(), *tensor.stride()[:2])):
        return "codes or pairs that do not start at a 4-byte word"
    return None


def _refused_codebook(part: Coded) -> str | None:
    """Why the kernels cannot read a codebook's codes; None where they can."""
    codes, norm, levels = part.codes, part.norm, part.levels
    inner = codes.shape[2:]
    if codes.stride()[2:] != (inner[1] * inner[2], inner[2], 1) or norm.stride(2) != 1:
        return "codes or norms that are not contiguous within a head"
    if norm.dtype != torch.float16:
        return f"norms of {norm.dtype}"
    if levels.shape != (2**part.bits,) or levels.dtype != torch.float32 or not levels.is_contiguous():
        return "levels other than one float32 for each code"
    if any(offset % 4 for offset in (codes.storage_offset(), *codes.stride()[:2])):
        return "codes that do not start at a 4-byte word"
    return None


@dataclass(frozen=True)
class Sections:
    """Slots where keys and values are both packed, one of them is (`alone`: "keys", "values" or ""), or neither."""

    both: int
    one: int
    none: int
    alone: str


def sections_of(key: Side, value: Side, by_pointer: bool) -> Sections:
    """The sections of a store; with lengths on the device, their largest possible sizes."""
    both = min(key.packed_length, value.packed_length)
    if not by_pointer:
        either = max(key.packed_length, value.packed_length)
        alone = "" if either == both else "keys" if key.packed_length > both else "values"
        return Sections(both, either - both, key.length - either, alone)
    none = min(key.dense_length, value.dense_length)
    if key.packed is not None and value.dense is not None:
        return Sections(both, min(key.packed_length, value.dense_length), none, "keys")
    if value.packed is not None and key.dense is not None:
        return Sections(both, min(value.packed_length, key.dense_length), none, "values")
    return Sections(both, 0, none, "")


def sinks_fit(n_sink: int, key: Side, value: Side) -> bool:
    """Whether the sinks end before either side changes from packed to dense."""
    return n_sink <= min(n for n in (key.packed_length, value.packed_length, key.length) if n)


@dataclass(frozen=True)
class Work:
    """One call of `TritonKernel.attend`, with the layout of its keys and values."""

    query: Tensor
    key: Side
    value: Side
    sections: Sections
    scoring: Scoring
    visible: Tensor | None
    sink_query: Tensor | None
    n_sink: int
    lengths: Tensor | None

    @property
    def kv_heads(self) -> int:
        pieces = self.key.packed.codes if self.key.packed is not None else self.key.dense
        return 0 if pieces is None else pieces.shape[1]

    @property
    def rows(self) -> int:
        """Query rows of one KV head."""
        return self.query.shape[1] // self.kv_heads * self.query.shape[2]

    @property
    def value_dim(self) -> int:
        if self.value.packed is not None:
            return head_dim(self.value.packed)
        return 0 if self.value.dense is None else self.value.dense.shape[3]
