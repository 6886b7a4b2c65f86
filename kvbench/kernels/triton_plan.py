"""From one call of `TritonKernel.attend` to two kernel launches: their grids, arguments and compile-time constants."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.triton_pieces import Sections, Work

MOST_ROWS = 16
"""Most query rows of one KV head (heads times tokens) per program; further rows read the cache again."""

PROGRAMS_PER_PROCESSOR = 8
"""Most one-warp programs on a multiprocessor: its registers allow no more."""

MOST_PROGRAMS = 256
"""Most programs of one section and KV head: `combine` reads a result from each."""

TILE_BYTES = 16 * 1024
"""Bytes of the dense keys and values of one tile."""

SHARES, CHANNELS, COLUMNS = 64, 32, 1024
"""Tile sizes of `combine`: programs, output channels, probabilities."""


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, its arguments at run time and its constants at compile time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.num_warps)


def plan(work: Work, want_probabilities: bool) -> tuple[list[Launch], Tensor, Tensor | None]:
    """The two launches, and the output and the probabilities that they fill."""
    from kvbench.kernels.triton_combine import combine as combine_kernel
    from kvbench.kernels.triton_kernels import INTERPRETED
    from kvbench.kernels.triton_kernels import decode as decode_kernel

    query, kv_heads, rows, value_dim = work.query, work.kv_heads, work.rows, work.value_dim
    batch, heads, tokens, _ = query.shape
    constants = _constants(work) | {"PTX": not INTERPRETED and query.dtype != torch.float32}
    blocks = -(-rows // constants["N"])
    programs = _programs(work.sections, constants, batch * kv_heads * blocks, query.device)
    in_all = sum(programs) + (work.sink_query is not None)

    columns = work.key.length
    partial = query.new_empty(batch, kv_heads, in_all, rows, value_dim, dtype=torch.float32)
    maxima, sums = query.new_empty(2, batch, kv_heads, in_all, rows, dtype=torch.float32).unbind()
    output = query.new_empty(batch, heads, tokens, value_dim)
    probabilities = None
    if want_probabilities:
        grouped = batch, kv_heads, heads // kv_heads, tokens, columns
        probabilities = query.new_empty(grouped, dtype=torch.float32)
    lengths = None if work.lengths is None else work.lengths.expand(batch, kv_heads, 3)
    shared = {
        "lengths": lengths,
        "lengths_strides": None if lengths is None else lengths.stride()[:2],
        "scores": probabilities,
        "partial": partial,
        "maxima": maxima,
        "sums": sums,
        "columns": columns,
        "slots": columns,
    }
    decode = Launch(
        decode_kernel,
        (in_all, batch * kv_heads, blocks),
        shared | _pieces(work) | _scoring(work) | dict(zip(PROGRAMS, programs, strict=True)),
        constants,
        num_warps=1,
    )
    parts = -(-value_dim // CHANNELS) + (-(-columns // COLUMNS) if want_probabilities else 0)
    combine = Launch(
        combine_kernel,
        (batch * kv_heads * rows, parts),
        shared | {"sink_logits": work.scoring.sink_logits, "output": output, "programs": in_all},
        {
            "KV_HEADS": kv_heads,
            "ROWS": rows,
            "TOKENS": tokens,
            "DV": value_dim,
            "CHANNELS": CHANNELS,
            "PROGRAMS": SHARES,
            "COLUMNS": COLUMNS,
        },
        num_warps=4,
    )
    return [decode, combine], output, probabilities


PROGRAMS = ("both_programs", "one_programs", "none_programs")


def _pieces(work: Work) -> dict[str, Any]:
    """The kernel's arguments for queries, keys, values and the mask: addresses, strides, lengths."""
    key, value, visible = work.key, work.value, work.visible
    sizes = [side.size if work.lengths is None or side.is_ring else None for side in (key, value)]
    if visible is not None:
        batch, _, tokens, _ = work.query.shape
        visible = visible.expand(batch, work.kv_heads, tokens, key.length)
    return {
        "query": work.query,
        "sink_query": work.sink_query,
        "n_sink": work.n_sink,
        "visible": visible,
        "visible_strides": None if visible is None else visible.stride(),
        "key_packed": key.pointers(),
        "key_rows": key.dense,
        "key_strides": key.strides(),
        "key_start": key.start,
        "key_size": sizes[0],
        "packed_keys": key.packed_length,
        "value_packed": value.pointers(),
        "value_rows": value.dense,
        "value_strides": value.strides(),
        "value_start": value.start,
        "value_size": sizes[1],
        "packed_values": value.packed_length,
    }


def _scoring(work: Work) -> dict[str, float | None]:
    """The factors on scores; the kernels compute powers of 2."""
    to_base_2, softcap = math.log2(math.e), work.scoring.softcap
    if softcap is None:
        return {"scale": work.scoring.scaling * to_base_2, "softcap": None}
    return {"scale": work.scoring.scaling / softcap, "softcap": softcap * to_base_2}


def _constants(work: Work) -> dict[str, Any]:
    """The compile-time constants of `decode`."""
    import triton.language as tl

    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    query, key, value, sections = work.query, work.key.packed, work.value.packed, work.sections
    head, value_head = query.shape[3], work.value_dim
    width, value_width = _power_of_2(head), _power_of_2(value_head)
    exact = query.dtype == torch.float32
    key_dtype = _dense_dtype(work.key.dense, query)
    value_dtype = _dense_dtype(work.value.dense, query)
    by_token = work.key.by_token
    bits = [16 if packed is None else packed.bits for packed in (key, value)]
    tile = 32 if exact or 8 in bits or 3 in bits else 64
    if key is not None and by_token:  # enough words along the tokens for the 8 threads that share a channel
        tile = max(key.group_size, 32 if exact else 256 // key.bits)
    slot_bytes = 2 * max(key_dtype.itemsize, value_dtype.itemsize) * max(width, value_width)
    none_tile = min(64, _power_of_2(TILE_BYTES // slot_bytes // (2 if sections.both else 1)))
    return {
        "KV_HEADS": work.kv_heads,
        "ROWS": work.rows,
        "TOKENS": query.shape[2],
        "N": 8 if work.rows <= 8 else MOST_ROWS,
        "D": head,
        "DV": value_head,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "K_BY_TOKEN": by_token,
        "K_BITS": bits[0],
        "K_GROUP": 32 if key is None else key.group_size,
        "V_BITS": bits[1],
        "V_GROUP": 32 if value is None else value.group_size,
        "BOTH": sections.both > 0,
        "ONE": sections.alone,
        "NONE": sections.none > 0,
        "PACKED_DTYPE": tl.float32 if exact else tl.float16,
        "KEY_DTYPE": types[key_dtype],
        "VALUE_DTYPE": types[value_dtype],
        "T": tile,
        "NONE_T": none_tile,
        "STAGES": 3,
        "DENSE_STAGES": 2 if sections.both else 3,
    }


def _dense_dtype(rows: Tensor | None, query: Tensor) -> torch.dtype:
    """The dtype of products with dense rows: 16 bits if both factors have the same 16-bit dtype or rows have 8 bits."""
    same = rows is None or rows.dtype in (query.dtype, torch.float8_e4m3fn)  # 8 bits fit into any 16
    return query.dtype if same else torch.float32


def _programs(sections: Sections, constants: dict[str, Any], walks: int, device: torch.device) -> tuple[int, int, int]:
    """Programs of each section for one KV head and block of rows. walks: number of pairs of KV head and block."""
    tile, none_tile = constants["T"], constants["NONE_T"]
    at_once = 16  # under the interpreter: few, but more than one a section
    if device.type == "cuda":
        device_has = torch.cuda.get_device_properties(device)
        staged = (constants["STAGES"] - 1) * max(TILE_BYTES, _packed_bytes(constants) if sections.both else 0)
        fitting = device_has.shared_memory_per_multiprocessor // (staged + 4096)
        at_once = device_has.multi_processor_count * max(1, min(PROGRAMS_PER_PROCESSOR, fitting))
    return (
        _fewest_tiles(-(-sections.both // tile), walks, at_once),
        _fewest_tiles(-(-sections.one // tile), walks, at_once),
        _fewest_tiles(-(-sections.none // none_tile), walks, at_once),
    )


def _packed_bytes(constants: dict[str, Any]) -> int:
    """Bytes of codes and pairs of one tile with keys and values packed."""
    sides = (("K", constants["WIDTH"]), ("V", constants["VALUE_WIDTH"]))
    slot = [width * constants[f"{k}_BITS"] // 8 + 4 * width // constants[f"{k}_GROUP"] for k, width in sides]
    return int(constants["T"] * sum(slot))


@lru_cache(maxsize=1024)
def _fewest_tiles(tiles: int, walks: int, at_once: int) -> int:
    """The number of programs that read so many tiles in the shortest time, where `at_once` programs run at a time.

    The time is the number of rounds of programs, times the tiles of a program plus one for its start and end.
    """

    def time(programs: int) -> int:
        return -(-walks * programs // at_once) * (-(-tiles // programs) + 1)

    return min(range(1, min(tiles, MOST_PROGRAMS) + 1), key=time, default=0)


def _power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n and at least 16, the smallest size of tensor cores."""
    return max(16, 1 << (n - 1).bit_length())
