"""Decodes words of packed codes into numbers, for `kvbench.kernels.triton_tiles`."""

# mypy: ignore-errors
# The code below is Triton's dialect of Python, which a type checker does not know.

import triton
import triton.language as tl


@triton.constexpr_function
def read_bits(stored):
    """Bits of a code after its words are read: 3-bit codes are moved into words of 4-bit codes."""
    return 4 if stored == 3 else stored


@triton.jit
def codes_at(words, scale, minimum, LANE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Code number LANE of the low byte of each 16-bit half, dequantised: [..., 2] from three tensors of halves.

    The PTX decodes both halves at once: a code is OR-ed into the mantissa of 1024.0, one multiply-add subtracts 1024
    exactly, and another applies scale and minimum. The other branch computes the same in plain operations.
    """
    MASK: tl.constexpr = 2**BITS - 1
    if PTX:
        FIELD: tl.constexpr = (MASK << (LANE * BITS)) * 0x10001
        UNIT: tl.constexpr = (0x3C00 - ((LANE * BITS) << 10)) * 0x10001  # 2^-(LANE * BITS), twice
        OFFSET: tl.constexpr = (0xE400 - ((LANE * BITS) << 10)) * 0x10001  # -1024 times that
        both = tl.inline_asm_elementwise(
            """{ .reg .b32 x;
            lop3.b32 x, $1, $4, 0x64006400, 0xEA;
            fma.rn.f16x2 x, x, $5, $6;
            fma.rn.f16x2 $0, x, $2, $3; }""",
            "=r,r,r,r,r,r,r",
            [words, scale, minimum, FIELD, UNIT, OFFSET],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
        result = tl.join(low_half(both), high_half(both))
    else:
        code = words >> (LANE * BITS)
        low = (code & MASK).to(tl.float32) * low_half(scale).to(tl.float32) + low_half(minimum).to(tl.float32)
        code = code >> 16
        high = (code & MASK).to(tl.float32) * high_half(scale).to(tl.float32) + high_half(minimum).to(tl.float32)
        result = tl.join(low.to(DTYPE), high.to(DTYPE))
    return result


@triton.jit
def levels_at(words, norm, levels, LANE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """`codes_at` for 4-bit indices of levels: level times norm, [..., 2].

    levels: with PTX the `byte_tables`; otherwise a pointer to float32. The PTX looks up the bytes of four codes at a
    time, both lanes of both halves, and joins those of LANE.
    """
    if PTX:
        lower = bytes_at(words, levels[0], levels[1], levels[2], levels[3])
        upper = bytes_at(words, levels[4], levels[5], levels[6], levels[7])
        PICK: tl.constexpr = 0x7351 if LANE == 1 else 0x6240
        both = tl.inline_asm_elementwise(
            """{ .reg .b32 x;
            prmt.b32 x, $1, $2, $3;
            mul.rn.f16x2 $0, x, $4; }""",
            "=r,r,r,r,r",
            [lower, upper, PICK, norm],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
        result = tl.join(low_half(both), high_half(both))
    else:
        code = words >> (LANE * 4)
        low = tl.load(levels + (code & 15)) * low_half(norm).to(tl.float32)
        high = tl.load(levels + (code >> 16 & 15)) * high_half(norm).to(tl.float32)
        result = tl.join(low.to(DTYPE), high.to(DTYPE))
    return result


@triton.jit
def bytes_at(words, a, b, c, d):
    """For the codes in bytes 0 and 2 of words, from the low bits up: their bytes of a table of 16, held by a .. d."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 x, y, s, m;
        prmt.b32 s, $1, 0x0, 0x4420;
        and.b32 x, s, 0x7777;
        prmt.b32 y, $4, $5, x;
        prmt.b32 x, $2, $3, x;
        shr.b32 m, s, 0x1;
        and.b32 m, m, 0x4444;
        prmt.b32 m, 0x0, 0xffffffff, m;
        lop3.b32 $0, x, y, m, 0xD8; }""",
        "=r,r,r,r,r,r",
        [words, a, b, c, d],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def byte_tables(levels, BITS: tl.constexpr):
    """The 2^BITS float32 levels as float16, for `levels_at`: four words of low bytes, then four of high bytes."""
    return (
        byte_table(levels, 0, 0, BITS),
        byte_table(levels, 4, 0, BITS),
        byte_table(levels, 8, 0, BITS),
        byte_table(levels, 12, 0, BITS),
        byte_table(levels, 0, 8, BITS),
        byte_table(levels, 4, 8, BITS),
        byte_table(levels, 8, 8, BITS),
        byte_table(levels, 12, 8, BITS),
    )


@triton.jit
def byte_table(levels, FIRST: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Bits SHIFT .. SHIFT + 7 of four levels in one word; after the last level the first follows."""
    table = tl.load(levels).to(tl.uint32) * 0
    for i in tl.static_range(4):
        half = tl.load(levels + (FIRST + i) % 2**BITS).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        table |= (half >> SHIFT & 255) << (8 * i)
    return table


@triton.jit
def low_half(words):
    return words.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(words):
    return (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def dequantise(words, scale, minimum, levels, BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """All codes of uint32 `words` [...]: [..., byte of the half (2), half (2), code of the byte (8 / BITS)].

    scale, minimum: words of two float16, one for each half, broadcastable to [...].
    levels: None, or the levels as `levels_at` takes them, for codes of 4 bits; `scale` is then the norm.
    """
    words = tl.join(words, words >> 8)
    scale, minimum = tl.expand_dims(scale, -1), tl.expand_dims(minimum, -1)
    if levels is not None:
        first = levels_at(words, scale, levels, 0, DTYPE, PTX)
        result = tl.join(first, levels_at(words, scale, levels, 1, DTYPE, PTX))
    elif BITS == 8:
        result = codes_at(words, scale, minimum, 0, BITS, DTYPE, PTX)
    elif BITS == 4:
        first = codes_at(words, scale, minimum, 0, BITS, DTYPE, PTX)
        result = tl.join(first, codes_at(words, scale, minimum, 1, BITS, DTYPE, PTX))
    else:
        first = codes_at(words, scale, minimum, 0, BITS, DTYPE, PTX)
        even = tl.join(first, codes_at(words, scale, minimum, 2, BITS, DTYPE, PTX))
        second = codes_at(words, scale, minimum, 1, BITS, DTYPE, PTX)
        result = tl.join(even, tl.join(second, codes_at(words, scale, minimum, 3, BITS, DTYPE, PTX)))
    return result


@triton.jit
def pair_up(rows, PTX: tl.constexpr):
    """uint32 words [..., 2] of two rows -> [..., 2] words: bytes 0 and 1 of both rows side by side, then 2 and 3."""
    a, b = tl.split(rows)
    if PTX:
        lower = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.uint32, True, 1)
        upper = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        lower, upper = (a & 0xFFFF) | (b << 16), (a >> 16) | (b & 0xFFFF0000)
    return tl.join(lower, upper)


@triton.jit
def load_words(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.uint32, bitcast=True)
