"""The first Triton kernel of decode attention: each program computes one range of slots of one KV head.

`decode`: a program is one warp. It reads its range tile by tile, with a running softmax (`triton_walk`), and writes its
share of the result (a maximum, a sum, an unnormalised output) to a workspace. `combine` (`triton_combine`) adds up the
shares.

The keys of a store, and its values, are a packed piece, a dense piece, or one after the other. So there are up to three
sections of slots: both sides packed, one of them, neither. One launch covers all sections, each with its own programs.
"""

# mypy: ignore-errors
# The code below is Triton's dialect of Python, which a type checker does not know.

import triton
import triton.language as tl

from kvbench.kernels.triton_walk import DENSE, walk
from kvbench.kernels.triton_words import byte_tables


@triton.jit(
    do_not_specialize=[
        "packed_keys",
        "packed_values",
        "slots",
        "key_start",
        "key_size",
        "value_start",
        "value_size",
        "n_sink",
        "both_programs",
        "one_programs",
        "none_programs",
        "columns",
    ]
)
def decode(
    query,
    sink_query,
    visible,
    lengths,
    scores,
    partial,
    maxima,
    sums,
    key_packed,
    key_rows,
    key_strides,
    value_packed,
    value_rows,
    value_strides,
    visible_strides,
    lengths_strides,
    packed_keys,
    packed_values,
    slots,
    key_start,
    key_size,
    value_start,
    value_size,
    n_sink,
    both_programs,
    one_programs,
    none_programs,
    columns,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    K_BITS: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_BY_TOKEN: tl.constexpr,
    V_BITS: tl.constexpr,
    V_GROUP: tl.constexpr,
    BOTH: tl.constexpr,
    ONE: tl.constexpr,
    NONE: tl.constexpr,
    PACKED_DTYPE: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    T: tl.constexpr,
    NONE_T: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program's share of one section. Grid: (programs, B * Hkv, blocks of N query rows).

    Args:
        query, sink_query: [B, Hkv, ROWS, D]; a row is a head of the KV head and one of its TOKENS tokens.
            sink_query is None or what the first `n_sink` slots are scored with, by program 0.
        visible: bool [B, Hkv, TOKENS, slots] with strides, or None. scores: float32 [B, Hkv, ROWS, columns] or None.
        lengths: None, or int32 [B, Hkv, 3] to be read instead of packed_keys, packed_values and slots.
        partial, maxima, sums: float32 [B, Hkv, programs, ROWS, DV] and twice [B, Hkv, programs, ROWS].
        key_packed: (codes, scale, minimum, None) in `Packed`'s layout, (codes, norm, None, levels) in `Coded`'s, or
            None; codes, and the pairs of keys grouped along tokens, as 4-byte words. key_rows: the dense piece, of
            which row `key_start` comes first; a ring of `key_size` rows unless that is None. key_strides: batch and
            head of codes, of pairs or norms, of rows, and slot of rows. The same for values.
        both_programs, one_programs, none_programs: programs of each section, 0 where there is no such section.
        scale: of the scores, times log2(e); with a softcap divided by it (and `softcap` is times log2(e)).
        BOTH, ONE, NONE: which sections there are; ONE is the side packed alone, "keys" or "values", or "".
        T: slots of a tile where something is packed; NONE_T where nothing is.
    """
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    if lengths is not None:
        lengths += batch * lengths_strides[0] + head * lengths_strides[1]
        packed_keys, packed_values, slots = tl.load(lengths), tl.load(lengths + 1), tl.load(lengths + 2)
        if key_size is not None:
            key_start = packed_keys % key_size
        if value_size is not None:
            value_start = packed_values % value_size
    both, either = tl.minimum(packed_keys, packed_values), tl.maximum(packed_keys, packed_values)

    place = tl.program_id(0)
    if sink_query is not None:
        place = tl.maximum(place - 1, 0)
    in_both = place < both_programs
    in_one = place < both_programs + one_programs
    begin = tl.where(in_both, 0, tl.where(in_one, both, either))
    end = tl.where(in_both, both, tl.where(in_one, either, slots))
    share = place - tl.where(in_both, 0, tl.where(in_one, both_programs, both_programs + one_programs))
    shares = tl.where(in_both, both_programs, tl.where(in_one, one_programs, none_programs))
    query += pair * ROWS * D
    if sink_query is not None:
        is_sink = tl.program_id(0) == 0
        begin = tl.where(is_sink, 0, tl.maximum(begin, n_sink))
        end = tl.where(is_sink, n_sink, end)
        share, shares = tl.where(is_sink, 0, share), tl.where(is_sink, 1, shares)
        query = tl.where(is_sink, sink_query + pair * ROWS * D, query)
    if visible is not None:
        visible += batch * visible_strides[0] + head * visible_strides[1]
    if scores is not None:
        scores += pair * ROWS * columns

    row = tl.program_id(2) * N + tl.arange(0, N)
    if K_BITS != DENSE:  # Triton 3.6 can neither compare nor return a tuple that holds None
        codes_at, pairs_at = head_at(key_strides, batch, head)
        key_packed = (
            key_packed[0] + codes_at,
            key_packed[1] + pairs_at,
            None if key_packed[2] is None else key_packed[2] + pairs_at,
            None if key_packed[3] is None else table_of(key_packed[3], K_BITS, PTX),
        )
    if key_rows is not None:
        key_rows += batch * key_strides[4] + head * key_strides[5]
    if V_BITS != DENSE:
        codes_at, pairs_at = head_at(value_strides, batch, head)
        value_packed = (
            value_packed[0] + codes_at,
            value_packed[1] + pairs_at,
            None if value_packed[2] is None else value_packed[2] + pairs_at,
            None if value_packed[3] is None else table_of(value_packed[3], V_BITS, PTX),
        )
    if value_rows is not None:
        value_rows += batch * value_strides[4] + head * value_strides[5]
    key = (key_packed, key_rows, key_strides[6], key_start, key_size, packed_keys)
    value = (value_packed, value_rows, value_strides[6], value_start, value_size, packed_values)
    work = (query, visible, visible_strides, scores, columns, row, begin, end, share, shares, scale, softcap)
    out = (partial, maxima, sums)
    call = (work, key, value, out)
    if in_both:
        if BOTH:
            walk(
                call,
                (K_BITS, V_BITS, PACKED_DTYPE, PACKED_DTYPE, T, STAGES),
                (ROWS, TOKENS, D, DV, WIDTH, VALUE_WIDTH, K_GROUP, K_BY_TOKEN, V_GROUP, PTX),
            )
    elif in_one:
        if ONE == "keys":
            walk(
                call,
                (K_BITS, DENSE, PACKED_DTYPE, VALUE_DTYPE, T, DENSE_STAGES),
                (ROWS, TOKENS, D, DV, WIDTH, VALUE_WIDTH, K_GROUP, K_BY_TOKEN, V_GROUP, PTX),
            )
        if ONE == "values":
            walk(
                call,
                (DENSE, V_BITS, KEY_DTYPE, PACKED_DTYPE, T, DENSE_STAGES),
                (ROWS, TOKENS, D, DV, WIDTH, VALUE_WIDTH, K_GROUP, False, V_GROUP, PTX),
            )
    else:
        if NONE:
            walk(
                call,
                (DENSE, DENSE, KEY_DTYPE, VALUE_DTYPE, NONE_T, DENSE_STAGES),
                (ROWS, TOKENS, D, DV, WIDTH, VALUE_WIDTH, K_GROUP, False, V_GROUP, PTX),
            )


@triton.jit
def head_at(strides, batch, head):
    """Offsets of one KV head in the codes, and in their pairs or norms."""
    return batch * strides[0] + head * strides[1], batch * strides[2] + head * strides[3]


@triton.jit
def table_of(levels, BITS: tl.constexpr, PTX: tl.constexpr):
    """The levels in the layout of `levels_at`."""
    if PTX:
        levels = byte_tables(levels, BITS)
    return levels


INTERPRETED = not isinstance(decode, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when this module was imported."""
