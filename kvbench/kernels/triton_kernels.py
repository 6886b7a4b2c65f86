"""Decode attention in Triton: the kernels behind `kvbench.kernels.triton_decode`.

`decode`: a program is one warp. It walks a range of slots of one KV head tile by tile, with a running softmax, and
leaves its share (a maximum, a sum, an unnormalised output) in a workspace. `combine` adds the shares up.

Each side of a store is a packed piece, a dense piece, or one after the other, so there are up to three sections of
slots: both sides packed, one of them, none. One launch serves them all; its programs are dealt out among them.
"""

# mypy: ignore-errors
# What stands below is Triton's dialect of Python, which a type checker does not know.

import triton
import triton.language as tl

from kvbench.kernels.triton_tiles import (
    dense_at,
    key_channel_at,
    keys_by_channel,
    keys_by_token,
    slot_at,
    value_channel_at,
    values_by_channel,
)
from kvbench.kernels.triton_words import byte_tables

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
DENSE = tl.constexpr(16)
"""Stands for the bits of a piece that is not packed."""


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
    if in_both:
        if BOTH:
            walk(
                work,
                key,
                value,
                out,
                K_BITS,
                V_BITS,
                PACKED_DTYPE,
                PACKED_DTYPE,
                T,
                STAGES,
                ROWS,
                TOKENS,
                D,
                DV,
                WIDTH,
                VALUE_WIDTH,
                K_GROUP,
                K_BY_TOKEN,
                V_GROUP,
                PTX,
            )
    elif in_one:
        if ONE == "keys":
            walk(
                work,
                key,
                value,
                out,
                K_BITS,
                DENSE,
                PACKED_DTYPE,
                VALUE_DTYPE,
                T,
                DENSE_STAGES,
                ROWS,
                TOKENS,
                D,
                DV,
                WIDTH,
                VALUE_WIDTH,
                K_GROUP,
                K_BY_TOKEN,
                V_GROUP,
                PTX,
            )
        if ONE == "values":
            walk(
                work,
                key,
                value,
                out,
                DENSE,
                V_BITS,
                KEY_DTYPE,
                PACKED_DTYPE,
                T,
                DENSE_STAGES,
                ROWS,
                TOKENS,
                D,
                DV,
                WIDTH,
                VALUE_WIDTH,
                K_GROUP,
                False,
                V_GROUP,
                PTX,
            )
    else:
        if NONE:
            walk(
                work,
                key,
                value,
                out,
                DENSE,
                DENSE,
                KEY_DTYPE,
                VALUE_DTYPE,
                NONE_T,
                DENSE_STAGES,
                ROWS,
                TOKENS,
                D,
                DV,
                WIDTH,
                VALUE_WIDTH,
                K_GROUP,
                False,
                V_GROUP,
                PTX,
            )


@triton.jit
def head_at(strides, batch, head):
    """How far into the codes, and into their pairs or norms, one KV head begins."""
    return batch * strides[0] + head * strides[1], batch * strides[2] + head * strides[3]


@triton.jit
def table_of(levels, BITS: tl.constexpr, PTX: tl.constexpr):
    """The levels as `levels_at` wants them."""
    if PTX:
        levels = byte_tables(levels, BITS)
    return levels


@triton.jit
def walk(
    work,
    key,
    value,
    out,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    T: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_BY_TOKEN: tl.constexpr,
    V_GROUP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Attention over slots begin .. end - 1 of one section, the part of them that is this program's."""
    query, visible, visible_strides, scores, columns, row, begin, end, share, shares, scale, softcap = work
    channel, value_channel = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    slot, value_slot = tl.arange(0, T), tl.arange(0, T)
    if K_BITS != DENSE and not K_BY_TOKEN:
        channel = key_channel_at(channel, WIDTH, K_GROUP, K_BITS)
    if V_BITS != DENSE:
        value_channel = value_channel_at(value_channel, VALUE_WIDTH, V_GROUP, V_BITS)
        value_slot = value_slot // 16 * 16 + value_slot % 4 * 4 + value_slot // 4 % 4
    if K_BY_TOKEN:
        slot, value_slot = slot_at(slot, T, K_GROUP, K_BITS), slot_at(value_slot, T, K_GROUP, K_BITS)
    is_row = row[None, :] < ROWS
    query = tl.load(query + row[None, :] * D + channel[:, None], mask=is_row & (channel < D)[:, None], other=0.0)
    query = query.to(K_DTYPE)

    first = begin // T
    tiles = tl.cdiv(end, T) - first
    top = tl.full(row.shape, NOTHING, tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    output = tl.zeros((VALUE_WIDTH, row.shape[0]), tl.float32)
    for tile in tl.range(first + tiles * share // shares, first + tiles * (share + 1) // shares, num_stages=STAGES):
        here = tile * T
        keys = tile_keys(key, here, here + slot, begin, end, T, D, WIDTH, K_GROUP, K_BITS, K_BY_TOKEN, K_DTYPE, PTX)
        score = tl.dot(keys, query, input_precision="tf32x3") * scale
        if softcap is not None:
            score = (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E)) + 1.0)) * softcap  # a tanh that cannot overflow
        inside = (here + slot >= begin) & (here + slot < end)
        score = tl.where(inside[:, None], score, NOTHING)
        if visible is not None:
            seen = visible + (row % TOKENS)[None, :] * visible_strides[2] + (here + slot)[:, None] * visible_strides[3]
            score = tl.where(tl.load(seen, mask=inside[:, None] & is_row, other=0) != 0, score, NOTHING)
        if scores is not None:
            to = scores + row[None, :].to(tl.int64) * columns + (here + slot)[:, None]
            tl.store(to, score, mask=inside[:, None] & is_row)

        new_top = tl.maximum(top, tl.max(score, 0))
        anchor = tl.where(new_top == NOTHING, 0.0, new_top)
        kept = tl.exp2(top - anchor)
        weight = tl.exp2(score - anchor[None, :])
        top, total, output = new_top, total * kept + tl.sum(weight, 0), output * kept[None, :]
        values = tile_values(value, here, value_slot, begin, end, T, DV, VALUE_WIDTH, V_GROUP, V_BITS, V_DTYPE, PTX)
        rounded = weight.to(V_DTYPE)
        output = tl.dot(values, rounded, output, input_precision="tf32x3")
        if V_DTYPE == tl.bfloat16:  # 8 bits of weight are too few: add what rounding took away
            output = tl.dot(values, (weight - rounded.to(tl.float32)).to(V_DTYPE), output)

    partial, maxima, sums = out
    at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ROWS + row
    tl.store(maxima + at, top, mask=row < ROWS)
    tl.store(sums + at, total, mask=row < ROWS)
    to = partial + at[None, :] * DV + value_channel[:, None]
    tl.store(to, output, mask=is_row & (value_channel < DV)[:, None])


@triton.jit
def tile_keys(
    key,
    here,
    slot,
    begin,
    end,
    T: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Keys [T, WIDTH] of slots here .. here + T - 1."""
    packed, rows, stride, start, size, n_packed = key
    if BITS == DENSE:
        slot, channel = slot[:, None], tl.arange(0, WIDTH)[None, :]
        inside = (slot >= begin) & (slot < end)
        keys = dense_at(rows, stride, start, size, slot - n_packed, inside, channel, D).to(DTYPE)
    elif BY_TOKEN:
        keys = keys_by_token(packed, here, end, T, D, WIDTH, G, BITS, DTYPE, PTX)
    else:
        keys = keys_by_channel(packed, here, end, T, D, WIDTH, G, BITS, DTYPE, PTX)
    return keys


@triton.jit
def tile_values(
    value,
    here,
    row,
    begin,
    end,
    T: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Values [WIDTH, T] of slots here .. here + T - 1, in the order here + row."""
    packed, rows, stride, start, size, n_packed = value
    if BITS == DENSE:
        slot, channel = here + row[None, :], tl.arange(0, WIDTH)[:, None]
        inside = (slot >= begin) & (slot < end)
        values = dense_at(rows, stride, start, size, slot - n_packed, inside, channel, D).to(DTYPE)
    else:
        values = values_by_channel(packed, row, here, end, T, D, WIDTH, G, BITS, DTYPE, PTX)
    return values


@triton.jit(do_not_specialize=["programs", "columns", "slots"])
def combine(
    partial,
    maxima,
    sums,
    sink_logits,
    scores,
    lengths,
    output,
    lengths_strides,
    programs,
    columns,
    slots,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DV: tl.constexpr,
    CHANNELS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The programs' shares as one softmax. Grid: (B * Hkv * ROWS, blocks of CHANNELS, then blocks of COLUMNS).

    output: [B, Hkv, ROWS, DV]. scores: float32 [B, Hkv, ROWS, columns], turned into probabilities in place, or None.
    sink_logits: [Hq] or None. PROGRAMS: shares added up at a time.
    """
    at = tl.program_id(0).to(tl.int64)
    pair, row = at // ROWS, at % ROWS
    share = tl.arange(0, PROGRAMS)
    first = pair * programs * ROWS + row

    top = tl.full((PROGRAMS,), NOTHING, tl.float32)
    for begin in range(0, programs, PROGRAMS):
        mask = begin + share < programs
        top = tl.maximum(top, tl.load(maxima + first + (begin + share) * ROWS, mask=mask, other=NOTHING))
    top = tl.max(top, 0)
    total = 0.0
    if sink_logits is not None:
        sink = tl.load(sink_logits + (pair % KV_HEADS) * (ROWS // TOKENS) + row // TOKENS).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    weighted = tl.zeros((CHANNELS,), tl.float32)
    for begin in range(0, programs, PROGRAMS):
        mask = begin + share < programs
        shift = tl.load(maxima + first + (begin + share) * ROWS, mask=mask, other=NOTHING) - top
        weight = tl.where(shift == NOTHING, 0.0, tl.exp2(shift))
        total += tl.sum(weight * tl.load(sums + first + (begin + share) * ROWS, mask=mask, other=0.0), 0)
        rows = partial + (first + (begin + share) * ROWS)[:, None] * DV + channel[None, :]
        rows = tl.load(rows, mask=mask[:, None] & (channel < DV)[None, :], other=0.0)
        weighted += tl.sum(rows * weight[:, None], 0)
    if tl.program_id(1) * CHANNELS < DV:
        tl.store(output + at * DV + channel, weighted / total, mask=channel < DV)
    elif scores is not None:
        if lengths is not None:
            slots = tl.load(lengths + pair // KV_HEADS * lengths_strides[0] + pair % KV_HEADS * lengths_strides[1] + 2)
        column = (tl.program_id(1) - tl.cdiv(DV, CHANNELS)) * COLUMNS + tl.arange(0, COLUMNS)
        score = tl.load(scores + at * columns + column, mask=column < slots, other=NOTHING)
        tl.store(scores + at * columns + column, tl.exp2(score - top) / total, mask=column < columns)


INTERPRETED = not isinstance(decode, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when this module was imported."""
