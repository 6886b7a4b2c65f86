"""Decode attention of one layer: our kernel against torch's own and against the memory's speed, as ratios in one run.

    python scripts/bench_kernels.py            # contexts 4k, 16k, 64k; some 5 minutes on 2 cores
    python scripts/bench_kernels.py --quick    # 4k and 16k, fewer rounds

Contenders take turns. In a turn each reads distinct caches that together are larger than the last-level cache. With one
thread a number is the median of the process's CPU times, which foreign load hardly touches; with two it is the fastest
call by the wall clock, which comes near an idle machine's where there were enough calls. Ratios are of such numbers.
"""

import argparse
import copy
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.cache.store import DenseStore, Slots, SlotShape, Store
from kvbench.kernels import choose
from kvbench.kernels.compile import load
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.prefill import Scoring
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.results.provenance import cpu_name

SHAPES = {"small": (9, 3, 64), "llama": (32, 8, 128)}
"""Query heads, KV heads and head size of SmolLM2-135M's and of Llama-3.1-8B's layers."""

STORES: dict[str, Store] = {
    "fp32": DenseStore(),
    "bf16": DenseStore("bfloat16"),
    "kivi8": Kivi(8, 8),
    "kivi4": Kivi(4, 4),
    "kivi2": Kivi(2, 2),
    "int8 per token": PerToken(8, 8),
    "int4 per token": PerToken(4, 4),
}


@dataclass
class Contender:
    """One way to attend. calls: one for each distinct cache, all of `bytes_read`. seconds: all timed calls."""

    name: str
    calls: list[Callable[[], object]]
    bytes_read: int
    seconds: list[float] = field(default_factory=list)
    threads: int = 1

    @property
    def time(self) -> float:
        """Seconds of a call: the median with one thread, the fastest with more."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.threads == 1 else min(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes_read / self.time


@dataclass
class Outcome:
    """Results of one shape and context for the verdicts, by number of threads."""

    over_torch: dict[int, float] = field(default_factory=dict)
    over_16_bit: dict[int, float] = field(default_factory=dict)
    share_of_read: dict[int, float] = field(default_factory=dict)


def last_level_bytes() -> int:
    """Bytes of the last-level cache; 32 MB where the system does not report it."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [file.read_text().strip() for file in files]
    return max((int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]] for size in sizes), default=32 * 2**20)


def copies(bytes_read: int) -> int:
    """Distinct caches that are together four times the last-level cache; where pages lie moves a single one by 20%."""
    return max(2, -(-4 * last_level_bytes() // bytes_read))


def slots_of(store: Store, key: Tensor, value: Tensor) -> Slots:
    batch, heads, context, dim = key.shape
    held = store.allocate(SlotShape(batch, heads, dim, dim, context, 1, torch.float32, key.device))
    held.fill(key, value)
    held.settle()
    return held


def ours(name: str, store: Store, query: Tensor, key: Tensor, value: Tensor, probabilities: bool = False) -> Contender:
    kernel, scoring = choose(query.device, wanted="cpu"), Scoring(query.shape[-1] ** -0.5)
    first = slots_of(store, key, value)
    bytes_read = sum(buffer.tensor.nbytes for buffer in first.buffers(first.length))
    distinct = [first, *(copy.deepcopy(first) for _ in range(copies(bytes_read) - 1))]

    options = AttendOptions(want_probabilities=probabilities)

    def attend(held: Slots) -> object:
        return kernel.attend(query, held.key_parts(), held.value_parts(), scoring, options)

    return Contender(f"ours, {name}", [lambda held=held: attend(held) for held in distinct], bytes_read)


def torchs(name: str, dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor) -> Contender:
    """torch's attention with the heads of a group as query tokens: twice as fast as its enable_gqa."""
    folded = query.unflatten(1, (key.shape[1], -1)).squeeze(-2).to(dtype)
    bytes_read = 2 * key.numel() * dtype.itemsize
    pairs = [(key.to(dtype, copy=True), value.to(dtype, copy=True)) for _ in range(copies(bytes_read))]
    calls = [lambda k=k, v=v: scaled_dot_product_attention(folded, k, v) for k, v in pairs]
    return Contender(f"torch SDPA, {name}", calls, bytes_read)


def reader() -> Contender:
    """Read bandwidth of the memory, from adding up more numbers than the caches hold."""
    function = load().kvbench_read
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_float
    memory = torch.ones(last_level_bytes())

    def read() -> object:
        return function(memory.data_ptr(), memory.numel(), torch.get_num_threads())

    return Contender("memory, read only", [read, read], memory.nbytes)


def race(contenders: Sequence[Contender], threads: int, rounds: int) -> None:
    """Rounds of turns; the first round is not counted."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    for contender in contenders:
        contender.threads, contender.seconds = threads, []
    for i in range(rounds + 1):
        for contender in contenders:
            for call in contender.calls:
                started = clock()
                call()
                if i:
                    contender.seconds.append(clock() - started)


@torch.inference_mode()
def measure(shape: str, context: int, rounds: int, console: Console) -> Outcome:
    """Race on one shape and context with one thread and two, and print the table."""
    heads, kv_heads, dim = SHAPES[shape]
    query = torch.randn(1, heads, 1, dim)
    key, value = torch.randn(2, 1, kv_heads, context, dim)
    read, stock = reader(), torchs("bf16", torch.bfloat16, query, key, value)
    stores = {name: ours(name, store, query, key, value) for name, store in STORES.items()}
    contenders = [read, torchs("fp32", torch.float32, query, key, value), stock, *stores.values()]
    contenders.append(ours("bf16, with probabilities", STORES["bf16"], query, key, value, probabilities=True))
    table = Table("", title=f"{shape}: {heads} query heads, {kv_heads} KV heads, D {dim}, {context} slots")
    rows: list[list[str]] = [[] for _ in contenders]
    bf16, int4, outcome = stores["bf16"], stores["kivi4"], Outcome()
    for threads in (1, 2):
        race(contenders, threads, rounds)
        for head in (f"{threads} thread{'s' * (threads > 1)}: ms", "GB/s", "of read", "x torch bf16", "x our bf16"):
            table.add_column(head, justify="right")
        for row, contender in zip(rows, contenders, strict=True):
            row += [f"{1e3 * contender.time:.3f}", f"{contender.bandwidth / 1e9:.1f}"]
            row += [f"{contender.bandwidth / read.bandwidth:.0%}"]
            row += [""] * 2 if contender is read else [f"{other.time / contender.time:.2f}" for other in (stock, bf16)]
        outcome.over_torch[threads] = stock.time / int4.time
        outcome.over_16_bit[threads] = bf16.time / int4.time
        outcome.share_of_read[threads] = max(bf16.bandwidth, stores["fp32"].bandwidth) / read.bandwidth
    for row, contender in zip(rows, contenders, strict=True):
        table.add_row(contender.name, *row)
    console.print(table)
    return outcome


@torch.inference_mode()
def call_overhead(console: Console) -> None:
    """Overhead of a call: its time on 130 slots, all in the L1 cache."""
    torch.set_num_threads(1)
    heads, kv_heads, dim = SHAPES["small"]
    query, rows = torch.randn(1, heads, 1, dim), torch.randn(1, kv_heads, 130, dim)
    for name in ("bf16", "kivi4"):
        contender = ours(name, STORES[name], query, rows, rows)
        contender.calls = contender.calls[:1] * 3000
        race([contender], threads=1, rounds=1)
        console.print(f"one call on 130 slots, small, {name}: {1e6 * contender.time:.0f} us, Python included")


def verdicts(found: dict[tuple[str, int], Outcome], console: Console) -> None:
    longest = max(context for _, context in found)
    rows: list[tuple[str, float, dict[int, float]]] = []
    for context in sorted({context for _, context in found if context >= 16384}):
        ratio = found["llama", context].over_torch
        rows.append((f"int4 (KIVI) over best torch bf16 SDPA, llama, {context} slots", 3.0, ratio))
    rows.append((f"int4 (KIVI) over our bf16, llama, {longest} slots", 1.3, found["llama", longest].over_16_bit))
    for shape in SHAPES:
        share = found[shape, longest].share_of_read
        rows.append((f"our bf16 or fp32, share of read bandwidth, {shape}, {longest} slots", 0.85, share))
    table = Table("what", "target", "1 thread", "2 threads", title="Verdicts")
    for what, target, values in rows:
        form = "{:.0%}" if target < 1 else "{:.2f}"
        cells = [form.format(value) + (" met" if value >= target else " missed") for value in values.values()]
        table.add_row(what, f">= {form.format(target)}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter contexts and fewer rounds")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds that count (default 9; quick 3)")
    arguments = parser.parse_args()
    contexts = (4096, 16384) if arguments.quick else (4096, 16384, 65536)
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    console = Console(width=None if Console().is_terminal else 170)
    machine = f"{cpu_name()}, {os.cpu_count()} cores, last-level cache {last_level_bytes() >> 20} MB"
    console.print(f"{machine}, torch {torch.__version__}, kernel {choose(torch.device('cpu')).name}")
    console.print(f"load {os.getloadavg()[0]:.1f}; above 0.5 the 2-thread columns say little")
    found = {(shape, n): measure(shape, n, rounds, console) for shape in SHAPES for n in contexts}
    call_overhead(console)
    verdicts(found, console)
    console.print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
