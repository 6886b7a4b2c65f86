"""Parts of a store as the compiled CPU kernel takes them: numbers in the order of `struct Part` in call.h.

The kernel does not take some layouts, and the reference reads them instead: head sizes that are not a multiple of 8 or
are beyond 512 (MLA's 512 + 64 channels lie in two parts), very many queries at once, channels that are not adjacent in
memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.parts import Coded, Dense, Packed, Paged, Part, Split, head_dim

QUERIES = (torch.float32, torch.bfloat16, torch.float16)

FORMATS = {torch.float32: 32, torch.float8_e4m3fn: 18, torch.bfloat16: 17, torch.float16: 16}
"""Numbers of the float formats in loops.h. Codes have their bits as number, codes of a codebook LEVELS + their bits."""

WIDTHS, LEVELS, LEVEL_WIDTHS = (8, 4, 3, 2), 64, (4, 3)

MOST_ROWS = 256
"""Most query rows of one KV head (heads times tokens); each row takes 6 kB of scratch memory per thread."""

LARGEST_HEAD = 512
SMALLEST_GROUP = 8

NOTHING = (0, 0, 0, 0)
"""The pointer and three strides of an absent tensor."""


def last_channels(keys: Sequence[Part]) -> list[Dense]:
    """The last channels of keys that are held in two parts; empty for other keys."""
    return [part.last_channels for part in keys if isinstance(part, Split)]


def pack_parts(query: Tensor, keys: Sequence[Part], values: Sequence[Part]) -> list[int] | None:
    """`struct Part` of all keys, of all values, then of the last channels of keys that are held in two parts.

    None where the kernel does not take the call.
    """
    batch, heads, tokens, channels = query.shape
    apart = last_channels(keys)
    if query.dtype not in QUERIES or not keys or not values or len(apart) not in (0, len(keys)):
        return None
    kv_heads, numbers = keys[0].kv_heads, list[int]()
    if heads % kv_heads or heads // kv_heads * tokens > MOST_ROWS:
        return None
    first = [part.first_channels if isinstance(part, Split) else part for part in keys]
    last_dim = head_dim(apart[0]) if apart else 0
    for side, columns in ((first, channels - last_dim), (values, head_dim(values[0])), (apart, last_dim)):
        if columns % 8 or columns > LARGEST_HEAD:
            return None
        for part in side:
            packed = pack(part, (batch, kv_heads), columns)
            if packed is None or (isinstance(part, Paged) and len(side) > 1):
                return None
            numbers += packed
    slots = sum(part.length for part in keys)
    return numbers if slots and slots == sum(part.length for part in values) else None


def pack(part: Part, lead: tuple[int, int], columns: int) -> tuple[int, ...] | None:
    """`struct Part` of a part; None where the kernel does not take it."""
    if isinstance(part, Paged):
        return pack_paged(part, lead, columns)
    packed = None
    if isinstance(part, Dense):
        packed = pack_dense(part, lead, columns)
    elif isinstance(part, Packed):
        packed = pack_codes(part, lead, columns)
    elif isinstance(part, Coded):
        packed = pack_coded(part, lead, columns)
    return None if packed is None else (*packed, *NOTHING)


def pack_paged(part: Paged, lead: tuple[int, int], columns: int) -> tuple[int, ...] | None:
    """`struct Part` of blocks: the rows of the pool, and the block table of each batch row and head."""
    pool, table = part.pool, part.table
    shared = pool.kv_heads == 1  # any head may hold any block
    packed = pack(pool, (1, pool.kv_heads), columns)
    if packed is None or packed[1] or pool.kv_heads not in (1, lead[1]) or table.shape[1] not in (1, lead[1]):
        return None
    if table.dtype != torch.int32 or table.shape[0] != lead[0] or table.stride(2) != 1:
        return None
    form, axis, group, _, data, _, head, row, scale, minimum, _, pair_head, *_ = packed
    table_head = 0 if table.shape[1] == 1 else table.stride(1)
    return (
        form,
        axis,
        group,
        part.length,
        data,
        0,
        0 if shared else head,
        row,
        scale,
        minimum,
        0,
        0 if shared else pair_head,
        table.data_ptr(),
        table.stride(0),
        table_head,
        part.block_size,
    )


def pack_dense(part: Dense, lead: tuple[int, int], columns: int) -> tuple[int, ...] | None:
    """`struct Part` of float rows; strides are in bytes."""
    rows = part.rows
    n, stride, size, form = rows.shape[2], rows.stride(), rows.element_size(), FORMATS.get(rows.dtype)
    if form is None or stride[3] != 1 or rows.shape != (*lead, n, columns):
        return None
    return form, 0, 1, n, rows.data_ptr(), stride[0] * size, stride[1] * size, stride[2] * size, *NOTHING


def pack_codes(part: Packed, lead: tuple[int, int], columns: int) -> tuple[int, ...] | None:
    """`struct Part` of codes: rows or blocks without gaps inside a head. Centred codes have no address of minima."""
    codes, scale, size = part.codes, part.scale, part.group_size
    minimum = scale if part.minimum is None else part.minimum
    by_token = part.axis == "token"
    n, groups, lane = codes.shape[2], columns if by_token else columns // size, size * part.bits // 8
    if part.bits not in WIDTHS or size < SMALLEST_GROUP or size % 8 or (not by_token and columns % size):
        return None
    if by_token and part.minimum is None:
        return None
    if codes.shape != (*lead, n, groups, lane) or not scale.shape == minimum.shape == (*lead, n, groups):
        return None
    code_stride, pair_stride = codes.stride(), scale.stride()
    if code_stride[2:] != (groups * lane, lane, 1) or pair_stride[2:] != (groups, 1) or minimum.stride() != pair_stride:
        return None
    if not scale.dtype == minimum.dtype == torch.float16:
        return None
    return (
        part.bits,
        int(by_token),
        size,
        n * size if by_token else n,
        codes.data_ptr(),
        *code_stride[:3],
        scale.data_ptr(),
        0 if part.minimum is None else minimum.data_ptr(),
        2 * pair_stride[0],
        2 * pair_stride[1],
    )


def pack_coded(part: Coded, lead: tuple[int, int], columns: int) -> tuple[int, ...] | None:
    """`struct Part` of a codebook's codes: rows without gaps inside a head."""
    codes, norm, levels, size = part.codes, part.norm, part.levels, part.group_size
    n, groups, lane = codes.shape[2], columns // size, size * part.bits // 8
    if part.bits not in LEVEL_WIDTHS or size < SMALLEST_GROUP or size % 8 or columns % size:
        return None
    if codes.shape != (*lead, n, groups, lane) or codes.stride()[2:] != (groups * lane, lane, 1):
        return None
    if norm.shape != (*lead, n) or norm.stride(2) != 1 or norm.dtype != torch.float16:
        return None
    if levels.shape != (2**part.bits,) or levels.dtype != torch.float32 or not levels.is_contiguous():
        return None
    return (
        LEVELS + part.bits,
        0,
        size,
        n,
        codes.data_ptr(),
        *codes.stride()[:3],
        norm.data_ptr(),
        levels.data_ptr(),
        2 * norm.stride(0),
        2 * norm.stride(1),
    )
