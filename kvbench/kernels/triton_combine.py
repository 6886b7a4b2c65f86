"""The second Triton kernel of decode attention: adds up the results of the programs of `decode`."""

# mypy: ignore-errors
# The code below is Triton's dialect of Python, which a type checker does not know.

import triton
import triton.language as tl

from kvbench.kernels.triton_walk import LOG2_E, NOTHING


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
