"""Decode attention of one layer on the GPU: our kernels against torch's and against the memory's speed.

    python scripts/gpu_kernels.py                       # Llama-3.1-8B's layer; some 2 minutes on an H200
    python scripts/gpu_kernels.py --device cpu --tiny   # to see that it runs

Every contender reads distinct caches in turn, together at least four times the L2; on CUDA all calls are one graph. A
contender that seems to read faster than the memory can be read has not read it: the run fails. Exits with 1 then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from the checkout, installed or not

from kvbench.kernels import REFERENCE, LengthsKernel, choose
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Axis, Dense, Packed, Part
from kvbench.kernels.prefill import Scoring
from scripts.gpu_timing import copies, device_name, device_of, parser, read_bandwidth, save, seconds

GROUP, RESIDUAL = 32, 128


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads, head size, and the sizes to go through."""

    heads: int
    kv_heads: int
    dim: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]


LLAMA = Shape(32, 8, 128, (4096, 16384, 65536, 131072), (1, 8, 32))
TINY = Shape(4, 2, 32, (256,), (1, 2))

Cache = tuple[list[Part], list[Part], Tensor]
"""Keys and values over whole buffers, and the three lengths."""


def dense(shape: Shape, batch: int, context: int, device: torch.device) -> Cache:
    rows = (torch.randn(batch, shape.kv_heads, context, shape.dim, device=device, dtype=torch.bfloat16) for _ in "kv")
    keys, values = (Dense(side) for side in rows)
    return [keys], [values], lengths(0, context, device)


def packed_rows(axis: Axis, bits: int, shape: Shape, batch: int, n: int, device: torch.device) -> Packed:
    """Random codes of n rows."""
    grid = (n // GROUP, shape.dim) if axis == "token" else (n, shape.dim // GROUP)
    lead = batch, shape.kv_heads, *grid
    codes = torch.randint(256, (*lead, GROUP * bits // 8), dtype=torch.uint8, device=device)
    scale = torch.rand(lead, device=device, dtype=torch.float16) / 2**bits
    return Packed(codes, scale, torch.full_like(scale, -0.5), bits, GROUP, axis)


def kivi(bits: int, shape: Shape, batch: int, context: int, device: torch.device) -> Cache:
    """KIVI's two sides with a full residual behind them."""
    n = context - RESIDUAL
    newest_keys, newest_values, _ = dense(shape, batch, RESIDUAL, device)
    keys: list[Part] = [packed_rows("token", bits, shape, batch, n, device), *newest_keys]
    values: list[Part] = [
        packed_rows("channel", bits, shape, batch, n, device),
        *(Dense(part.rows, is_ring=True) for part in newest_values),
    ]
    return keys, values, lengths(n, context, device)


def per_token(bits: int, shape: Shape, batch: int, context: int, device: torch.device) -> Cache:
    keys, values = (packed_rows("channel", bits, shape, batch, context, device) for _ in "kv")
    return [keys], [values], lengths(context, context, device)


def lengths(packed: int, filled: int, device: torch.device) -> Tensor:
    return torch.tensor([packed, packed, filled], dtype=torch.int32, device=device)


def cache_bytes(cache: Cache) -> int:
    total = 0
    for part in (*cache[0], *cache[1]):
        tensors = [part.rows] if isinstance(part, Dense) else [part.codes, part.scale, part.minimum]
        total += sum(tensor.nbytes for tensor in tensors)
    return total


Made = tuple[str, int, list[Callable[[], object]]]
"""A contender's name, the bytes that one of its calls reads, and its calls."""


def kernel_on(device: torch.device) -> LengthsKernel:
    """The kernel that a captured step runs on."""
    chosen = choose(device, torch.bfloat16)
    return chosen if isinstance(chosen, LengthsKernel) else REFERENCE


def ours(query: Tensor, shape: Shape, batch: int, context: int) -> Iterator[Made]:
    """Our kernel over each store; the caches of one are gone before the next one's are made."""
    device, scoring, kernel = query.device, Scoring(shape.dim**-0.5), kernel_on(query.device)
    stores: dict[str, Callable[[], Cache]] = {
        **{f"kivi{bits}": lambda b=bits: kivi(b, shape, batch, context, device) for bits in (8, 4, 2)},
        "int4 per token": lambda: per_token(4, shape, batch, context, device),
    }
    for name, make in stores.items():
        yield from ours_over(name, [make()], make, kernel, query, scoring, device)


def ours_over(
    name: str,
    caches: list[Cache],
    make: Callable[[], Cache] | None,
    kernel: LengthsKernel,
    query: Tensor,
    scoring: Scoring,
    device: torch.device,
    probabilities: bool = False,
) -> Iterator[Made]:
    read = cache_bytes(caches[0])
    if make is not None:
        caches += [make() for _ in range(copies(read, device) - 1)]

    def attend(cache: Cache) -> object:
        keys, values, filled = cache
        options = AttendOptions(want_probabilities=probabilities, lengths=filled)
        return kernel.attend(query, keys, values, scoring, options)

    yield f"ours, {name}", read, [lambda c=cache: attend(c) for cache in caches]


def sixteen_bit(query: Tensor, shape: Shape, batch: int, context: int) -> Iterator[Made]:
    """Our 16-bit kernel, and torch's attention in all its ways, over the same caches."""
    device, scoring, kernel = query.device, Scoring(shape.dim**-0.5), kernel_on(query.device)
    caches = [dense(shape, batch, context, device)]
    caches += [dense(shape, batch, context, device) for _ in range(copies(cache_bytes(caches[0]), device) - 1)]
    yield from ours_over("bf16", caches, None, kernel, query, scoring, device)
    yield from ours_over("bf16, with probabilities", caches, None, kernel, query, scoring, device, probabilities=True)
    pairs = [(cache[0][0].rows, cache[1][0].rows) for cache in caches]
    folded = query.unflatten(1, (shape.kv_heads, -1)).squeeze(-2)
    read = cache_bytes(caches[0])
    yield "torch SDPA", read, [lambda k=k, v=v: sdpa(query, k, v) for k, v in pairs]
    yield "torch SDPA, heads as tokens", read, [lambda k=k, v=v: sdpa(folded, k, v) for k, v in pairs]
    if device.type == "cuda":
        for name, backend in (("FlashAttention", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            yield f"torch {name}", read, [lambda k=k, v=v, b=backend: sdpa(query, k, v, b) for k, v in pairs]
            yield (
                f"torch {name}, heads as tokens",
                read,
                [lambda k=k, v=v, b=backend: sdpa(folded, k, v, b) for k, v in pairs],
            )


def sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None = None) -> Tensor:
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


@torch.inference_mode()
def measure(shape: Shape, batch: int, context: int, device: torch.device, bandwidth: float) -> list[dict[str, object]]:
    """The rows of one cell. A contender that fails has a row that says why."""
    query = torch.randn(batch, shape.heads, 1, shape.dim, device=device, dtype=torch.bfloat16)
    rows: list[dict[str, object]] = []
    for contenders in (sixteen_bit, ours):
        for name, read, calls in contenders(query, shape, batch, context):
            row: dict[str, object] = {
                "batch": batch,
                "context": context,
                "contender": name,
                "bytes": read,
                "caches": len(calls),
            }
            try:
                took = seconds(calls, device)
                row |= {"ms": 1e3 * took, "gb_per_s": read / took / 1e9, "of_read": read / took / bandwidth}
            except RuntimeError as error:  # a backend that does not take these shapes, or no memory
                row["error"] = str(error).strip().splitlines()[0][:160]
            rows.append(row)
            del calls
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def show(rows: list[dict[str, object]], console: Console) -> None:
    best = min((float(r["ms"]) for r in rows if str(r["contender"]).startswith("torch") and "ms" in r), default=0.0)
    table = Table(
        "contender",
        "ms",
        "GB/s",
        "of read",
        "x best torch",
        title=f"batch {rows[0]['batch']}, {rows[0]['context']} slots",
    )
    for row in rows:
        if "ms" not in row:
            table.add_row(str(row["contender"]), str(row["error"])[:60])
            continue
        ms = float(row["ms"])
        table.add_row(
            str(row["contender"]), f"{ms:.4f}", f"{row['gb_per_s']:.0f}", f"{row['of_read']:.1%}", f"{best / ms:.2f}"
        )
    console.print(table)


def verdicts(rows: list[dict[str, object]], console: Console) -> bool:
    """Print the targets; returns whether no contender reads faster than the memory."""
    found = {(r["contender"], r["batch"], r["context"]): r for r in rows if "ms" in r}
    for batch in sorted({int(r["batch"]) for r in rows}):
        sixteen, int4 = (found.get((f"ours, {name}", batch, 65536)) for name in ("bf16", "kivi4"))
        if sixteen is None or int4 is None:
            continue
        share, ratio = float(sixteen["of_read"]), float(sixteen["ms"]) / float(int4["ms"])
        console.print(
            f"batch {batch}, 64k: 16-bit kernel {share:.0%} of read bandwidth "
            f"(at least 75%: {'met' if share >= 0.75 else 'missed'}); int4 {ratio:.2f} x the 16-bit kernel "
            f"(at least 2.5: {'met' if ratio >= 2.5 else 'missed'})"
        )
    beyond = [r for r in found.values() if float(r["of_read"]) > 1]
    for r in beyond:
        console.print(
            f"FAILED: {r['contender']} at batch {r['batch']}, {r['context']} slots seems to read at "
            f"{r['of_read']:.1%} of what the memory gives"
        )
    return not beyond


def main() -> int:
    arguments = parser(__doc__).parse_args()
    device, console = device_of(arguments), Console(width=120)
    shape = TINY if arguments.tiny else LLAMA
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device)
    kernel = kernel_on(device).name
    facts = {"device": device_name(device), "kernel": kernel, "read_gb_per_s": bandwidth / 1e9, "shape": str(shape)}
    console.print(
        f"{device_name(device)}, torch {torch.__version__}, kernel {kernel}, memory read at {bandwidth / 1e9:.0f} GB/s"
    )
    rows: list[dict[str, object]] = []
    for batch in shape.batches:
        for context in shape.contexts:
            cell = measure(shape, batch, context, device, bandwidth)
            show(cell, console)
            rows += cell
            save(rows, arguments.out, **facts)
    whole = verdicts(rows, console)
    return 0 if whole or device.type == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main())
