"""Loads one tile of keys or values in the layout of the tensor cores, for `kvbench.kernels.triton_walk`.

Attention is computed transposed there,

    scores [T, N] = keys [T, D] @ query [D, N]        output [Dv, N] += values [Dv, T] @ probabilities [T, N]

so that codes are the first operand of the tensor cores, and 8 columns suffice for up to 8 query rows.

The softmax and the sums do not depend on the order of slots and channels in a tile. In the orders below (`slot_at`,
`key_channel_at`, `value_channel_at`) the words that a thread reads hold exactly the numbers that the tensor cores need
from that thread, so threads exchange nothing after unpacking. The words are copied to shared memory 16 bytes at a time,
in an order without bank conflicts: the words that a warp reads at the same time are adjacent. If a compiler chooses
another layout, the kernel is slower and its results are the same.

Arguments in capitals are compile-time constants.
"""

# mypy: ignore-errors
# The code below is Triton's dialect of Python, which a type checker does not know.

import triton
import triton.language as tl

from kvbench.kernels.triton_words import dequantise, load_words, pair_up, read_bits

# ------------------------------------------------------------------------------------------------ orders within a tile


@triton.jit
def slot_at(i, T, G, BITS):
    """The slot, counted from the tile's first, in row i of a tile whose keys are packed along tokens."""
    WORDS: tl.constexpr = G * BITS // 32
    BLOCK_LANES: tl.constexpr = min(T // G, 8)
    WORD_LANES: tl.constexpr = min(WORDS, 8 // BLOCK_LANES)
    word, i = i % WORD_LANES, i // WORD_LANES
    block, i = i % BLOCK_LANES, i // BLOCK_LANES
    code, i = i % (8 // BITS), i // (8 // BITS)
    byte, i = i % 4, i // 4
    word, i = word * (WORDS // WORD_LANES) + i % (WORDS // WORD_LANES), i // (WORDS // WORD_LANES)
    return (i * BLOCK_LANES + block) * G + code * (G * BITS // 8) + word * 4 + byte


@triton.jit
def key_channel_at(i, WIDTH, G, STORED):
    """The channel in column i of keys packed along channels, those of 3 bits as those of 4 bits."""
    BITS: tl.constexpr = read_bits(STORED)
    ROW: tl.constexpr = WIDTH * BITS // 32
    LANES: tl.constexpr = min(4, ROW)
    half, i = i % 2, i // 2
    byte, i = half * 2 + i % 2, i // 2
    word, i = i % LANES, i // LANES
    code, i = i % (8 // BITS), i // (8 // BITS)
    return channel_of(word * (ROW // LANES) + i, byte, code, G, BITS)


@triton.jit
def value_channel_at(i, WIDTH, G, STORED):
    """The channel in row i of values packed along channels, those of 3 bits as those of 4 bits."""
    BITS: tl.constexpr = read_bits(STORED)
    ROW: tl.constexpr = WIDTH * BITS // 32
    LANES: tl.constexpr = min(8, ROW)
    word, i = i % LANES, i // LANES
    code, i = i % (8 // BITS), i // (8 // BITS)
    return channel_of(word * (ROW // LANES) + i // 4, i % 4, code, G, BITS)


@triton.jit
def channel_of(word, byte, code, G, BITS):
    """The channel of a code, from its word in the row, its byte in the word and its place in the byte."""
    WORDS: tl.constexpr = G * BITS // 32
    return (word // WORDS) * G + code * (G * BITS // 8) + (word % WORDS) * 4 + byte


# ------------------------------------------------------------------------------------------------------ one tile's rows


@triton.jit
def keys_by_token(packed, first, stop, T, D, WIDTH, G, BITS, DTYPE, PTX):
    """Keys [T, WIDTH] of slots first .. first + T - 1, in the order of `slot_at`; codes [blocks, D, WORDS]."""
    codes, scale, minimum, levels = packed
    BLOCKS: tl.constexpr = T // G
    WORDS: tl.constexpr = G * BITS // 32
    BLOCK_LANES: tl.constexpr = min(BLOCKS, 8)
    WORD_LANES: tl.constexpr = min(WORDS, 8 // BLOCK_LANES)
    COPIES: tl.constexpr = max(1, WORDS // 4)  # copies of 16 bytes that a channel of a block takes,
    CHANNELS: tl.constexpr = max(1, 4 // WORDS)  # or channels that one copy brings
    # Threads that read at the same time hold channels 0, 4, 8 and 12 of 16, and the blocks of the tile.
    i, word = tl.arange(0, WIDTH * BLOCKS * WORDS // 4)[:, None], tl.arange(0, 4)[None, :]
    channel, i = i % 4 * 4, i // 4
    copy, i = i % COPIES, i // COPIES
    block, i = i % BLOCKS, i // BLOCKS
    channel += i % (4 // CHANNELS) * CHANNELS + i // (4 // CHANNELS) * 16
    skipped = (first // G).to(tl.int64) * D
    column = channel * WORDS + copy * 4 + word
    inside = (first + block * G < stop) & (column < D * WORDS)
    words = load_words(codes + skipped * WORDS + (block * (D * WORDS) + column), inside)
    words = tl.reshape(words, (WIDTH // 16, 4 // CHANNELS, BLOCKS, COPIES, 4, CHANNELS, WORDS // COPIES))
    words = tl.reshape(tl.permute(words, (2, 0, 4, 1, 5, 3, 6)), (BLOCKS, WIDTH // 2, 2, WORDS))
    words = pair_up(tl.permute(words, (0, 1, 3, 2)), PTX)
    block, pair = tl.arange(0, BLOCKS)[:, None], tl.arange(0, WIDTH // 2)[None, :]
    at, inside = skipped // 2 + block * (D // 2) + pair, (first + block * G < stop) & (pair < D // 2)
    scale, minimum = load_words(scale + at, inside), load_words(minimum + at, inside)
    keys = dequantise(words, scale[:, :, None, None], minimum[:, :, None, None], levels, BITS, DTYPE, PTX)
    keys = tl.reshape(
        keys, (BLOCKS // BLOCK_LANES, BLOCK_LANES, WIDTH // 2, WORD_LANES, WORDS // WORD_LANES, 2, 2, 2, 8 // BITS)
    )
    return tl.reshape(tl.permute(keys, (0, 4, 5, 6, 8, 1, 3, 2, 7)), (T, WIDTH))


@triton.jit
def keys_by_channel(packed, first, stop, T, D, WIDTH, G, STORED, DTYPE, PTX):
    """Keys [T, WIDTH] of slots first .. first + T - 1, channels in the order of `key_channel_at`."""
    BITS: tl.constexpr = read_bits(STORED)
    ROW: tl.constexpr = WIDTH * BITS // 32
    LANES: tl.constexpr = min(4, ROW)
    row = tl.arange(0, T)[:, None]
    if STORED == 3:
        words = row_words_of_3_bits(packed, first, row, stop, D, WIDTH, G)
    else:
        words = row_words(packed, first, row, tl.arange(0, ROW)[None, :], stop, D, BITS)
    words = tl.reshape(words, (T, WIDTH // G, G * BITS // 32))
    scale, minimum = row_pairs(packed, first, row, stop, D, WIDTH, G)
    scale, minimum = (scale | (scale << 16))[:, :, None], (minimum | (minimum << 16))[:, :, None]
    keys = dequantise(words, scale, minimum, packed[3], BITS, DTYPE, PTX)
    keys = tl.reshape(keys, (T, LANES, ROW // LANES, 2, 2, 8 // BITS))
    return tl.reshape(tl.permute(keys, (0, 2, 5, 1, 3, 4)), (T, WIDTH))


@triton.jit
def values_by_channel(packed, row, first, stop, T, D, WIDTH, G, STORED, DTYPE, PTX):
    """Values [WIDTH, T] of the slots first + row [T], channels in the order of `value_channel_at`.

    The input rows are in the order (T / 16, 4, 4), the output rows in the transposed order: the last 4 of the input are
    threads of one operand, which read adjacent words; the last 2 of the output share a register.
    """
    BITS: tl.constexpr = read_bits(STORED)
    ROW: tl.constexpr = WIDTH * BITS // 32
    COPY: tl.constexpr = min(4, ROW)
    GROUPS: tl.constexpr = WIDTH // G
    LANES: tl.constexpr = min(8, ROW)
    if STORED == 3:
        words = row_words_of_3_bits(packed, first, row[:, None], stop, D, WIDTH, G)
    else:
        i = tl.arange(0, T * ROW // COPY)
        every = tl.broadcast_to(tl.reshape(row, (T // 4, 1, 4)), (T // 4, ROW // COPY, 4))
        column = (i // 4 % (ROW // COPY) * COPY)[:, None] + tl.arange(0, COPY)[None, :]
        words = row_words(packed, first, tl.reshape(every, (T * ROW // COPY,))[:, None], column, stop, D, BITS)
        words = tl.permute(tl.reshape(words, (T // 4, ROW // COPY, 4, COPY)), (0, 2, 1, 3))
    words = tl.reshape(words, (T // 16, 2, 2, 4, ROW))
    words = pair_up(tl.permute(words, (0, 1, 3, 4, 2)), PTX)
    words = tl.reshape(words, (T // 16, 2, 4, GROUPS, ROW // GROUPS, 2))
    scale, minimum = row_pairs(packed, first, row[:, None], stop, D, WIDTH, G)
    scale, minimum = both_of_pair(scale, T, GROUPS), both_of_pair(minimum, T, GROUPS)
    values = dequantise(words, scale, minimum, packed[3], BITS, DTYPE, PTX)
    values = tl.reshape(values, (T // 16, 2, 4, LANES, ROW // LANES, 2, 2, 2, 8 // BITS))
    return tl.reshape(tl.permute(values, (4, 5, 6, 8, 3, 0, 2, 1, 7)), (WIDTH, T))


@triton.jit
def both_of_pair(halves, T, GROUPS):
    """The low halves [T, GROUPS] of both slots of a pair in one word: [T / 16, 2, 4, GROUPS, 1, 1]."""
    a, b = tl.split(tl.permute(tl.reshape(halves, (T // 16, 2, 2, 4, GROUPS)), (0, 1, 3, 4, 2)))
    return (a | (b << 16))[:, :, :, :, None, None]


@triton.jit
def row_words(packed, first, row, column, stop, D, BITS):
    """Words of rows packed along channels, from slot `first` on: `row` and `column` broadcast to the result."""
    ROW: tl.constexpr = D * BITS // 32
    at = packed[0] + first.to(tl.int64) * ROW + (row * ROW + column)
    return load_words(at, (first + row < stop) & (column < ROW))


@triton.jit
def row_words_of_3_bits(packed, first, row, stop, D, WIDTH, G):
    """Words [T, WIDTH / 8] of rows of 3-bit codes as if their codes were packed in 4 bits; `row` is [T, 1].

    A word of 4-bit codes holds every other lane of one word of low bits, and the high bit of each of those lanes from
    the same byte of one word of high bits.
    """
    T: tl.constexpr = row.shape[0]
    ROW: tl.constexpr = D * 3 // 32
    GROUPS: tl.constexpr = WIDTH // G
    LOWS: tl.constexpr = G // 16
    HIGHS: tl.constexpr = G // 32
    at, inside = packed[0] + first.to(tl.int64) * ROW + row * ROW, first + row < stop
    low, high = tl.arange(0, GROUPS * LOWS)[None, :], tl.arange(0, GROUPS * HIGHS)[None, :]
    lows = load_words(at + (low // LOWS * (LOWS + HIGHS) + low % LOWS), inside & (low < D // 16))
    highs = load_words(at + (high // HIGHS * (LOWS + HIGHS) + LOWS + high % HIGHS), inside & (high < D // 32))
    lane = tl.reshape(tl.arange(0, 2).to(tl.uint32), (1, 1, 2, 1))
    bit = tl.reshape(tl.arange(0, 4).to(tl.uint32), (1, 1, 2, 2, 1))
    lows = tl.reshape(lows, (T, GROUPS, 1, LOWS)) >> (2 * lane) & 0x33333333
    highs = tl.reshape(highs, (T, GROUPS, 1, 1, HIGHS)) >> bit & 0x11111111
    return tl.reshape(lows | (tl.reshape(highs, (T, GROUPS, 2, LOWS)) << 2), (T, WIDTH // 8))


@triton.jit
def row_pairs(packed, first, row, stop, D, WIDTH, G):
    """Scales and minima [T, WIDTH / G] of `row` [T, 1], from slot `first` on, each in the low half of a word.

    Without minima the scales are one norm a row, and the minima 0.
    """
    column = tl.arange(0, WIDTH // G)[None, :]
    if packed[2] is None:
        scale = tl.load(packed[1] + first.to(tl.int64) + row, mask=first + row < stop, other=0.0)
        scale = tl.broadcast_to(scale.to(tl.uint16, bitcast=True).to(tl.uint32), (row.shape[0], WIDTH // G))
        minimum = tl.zeros_like(scale)
    else:
        at, mask = first.to(tl.int64) * (D // G) + (row * (D // G) + column), (first + row < stop) & (column < D // G)
        scale, minimum = tl.load(packed[1] + at, mask=mask, other=0.0), tl.load(packed[2] + at, mask=mask, other=0.0)
        scale, minimum = scale.to(tl.uint16, bitcast=True), minimum.to(tl.uint16, bitcast=True)
        scale, minimum = scale.to(tl.uint32), minimum.to(tl.uint32)
    return scale, minimum


@triton.jit
def dense_at(rows, stride, start, size, index, inside, channel, D):
    """Rows `index` at `channel`, two tensors that broadcast to the result, where `inside`; zero elsewhere.

    Row 0 is at row `start` of a ring of `size` rows; size is None where no index goes beyond the end.
    """
    row = index + start
    if size is not None:
        row = tl.where(row >= size, row - size, row)
    return tl.load(rows + row.to(tl.int64) * stride + channel, mask=inside & (channel < D), other=0.0)
