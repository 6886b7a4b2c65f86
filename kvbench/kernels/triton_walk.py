"""One Triton program's part of decode attention: a loop over tiles of slots with a running softmax.

Arguments in capitals are compile-time constants.
"""

# mypy: ignore-errors
# The code below is Triton's dialect of Python, which a type checker does not know.

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

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
DENSE = tl.constexpr(16)
"""In place of the bits of a piece that is not packed."""


@triton.jit
def walk(call, section, shape):
    """Attention over slots begin .. end - 1 of one section, the part of them that is this program's.

    call: the first four arguments of `walk_tiles`. section, shape: tuples of compile-time constants, its other ones.
    """
    walk_tiles(*call, *section, *shape)


@triton.jit
def walk_tiles(
    work,
    key,
    value,
    out,
    K_BITS,
    V_BITS,
    K_DTYPE,
    V_DTYPE,
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
):
    """See `walk`."""
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
def tile_keys(key, here, slot, begin, end, T, D, WIDTH, G, BITS, BY_TOKEN, DTYPE, PTX):
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
def tile_values(value, here, row, begin, end, T, D, WIDTH, G, BITS, DTYPE, PTX):
    """Values [WIDTH, T] of slots here .. here + T - 1, in the order here + row."""
    packed, rows, stride, start, size, n_packed = value
    if BITS == DENSE:
        slot, channel = here + row[None, :], tl.arange(0, WIDTH)[:, None]
        inside = (slot >= begin) & (slot < end)
        values = dense_at(rows, stride, start, size, slot - n_packed, inside, channel, D).to(DTYPE)
    else:
        values = values_by_channel(packed, row, here, end, T, D, WIDTH, G, BITS, DTYPE, PTX)
    return values
