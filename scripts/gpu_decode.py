"""Decode end to end on the GPU, under a CUDA graph, on a random model in the shape of Llama 3.1 8B: speed only.

    python scripts/gpu_decode.py                       # some 3 minutes on an H200
    python scripts/gpu_decode.py --device cpu --tiny   # to see that it runs

Caches are filled with random keys and values, as many bytes as a prompt of that length leaves. A step's time is held
against (weights + cache) / measured read bandwidth: what it would take if nothing but memory counted. A row of
transformers' StaticCache under torch.compile stands beside.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from the checkout, installed or not

from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.forward import cache_argument
from kvbench.cache.graph import WARM_UP, decoder_for
from kvbench.cache.observe import ColumnSums, Observation
from kvbench.cache.record import LayerRecord, PrefillRecord, clock
from kvbench.cache.store import DenseStore
from kvbench.kernels.prefill import Scoring
from kvbench.measures.latency.machine import read_bytes
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.load import LoadedModel, load_model, model_spec
from scripts.gpu_timing import device_name, device_of, parser, read_bandwidth, save

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}

MEMORY_BOUND = 1.25
"""Target: TPOT at batch 8 and 64k, divided by the time to read weights and cache once."""


@dataclass(frozen=True)
class Cell:
    """One cell: batch, context and the cache that decodes. compiled: feed-forward and norms under torch.compile."""

    batch: int
    context: int
    entry: str
    compiled: bool = False


@dataclass(frozen=True)
class Plan:
    """Cells with the most important first, in case time runs out; budgets; numbers of timed steps."""

    cells: tuple[Cell, ...]
    budget: int
    steps: int


OURS = ("full", "kivi4", "kivi2", "h2o", "streaming_llm")
FULL_PLAN = Plan(
    (
        *(Cell(8, 65536, entry) for entry in ("full", "kivi4")),
        *(Cell(1, 65536, entry) for entry in OURS),
        *(Cell(1, 4096, entry) for entry in OURS),
        Cell(8, 65536, "kivi2"),
        Cell(8, 65536, "h2o"),
        Cell(1, 131072, "full"),
        Cell(1, 131072, "kivi4"),
        *(Cell(32, 4096, entry) for entry in ("full", "kivi4")),
        *(Cell(1, c, entry, compiled=True) for c in (4096, 65536) for entry in ("full", "kivi4")),
        Cell(1, 4096, "StaticCache"),
        Cell(1, 65536, "StaticCache"),
        Cell(8, 65536, "StaticCache"),
    ),
    1024,
    32,
)
TINY_PLAN = Plan(
    (*(Cell(2, 256, entry) for entry in OURS), Cell(1, 256, "full", compiled=True), Cell(2, 256, "StaticCache")), 64, 4
)


def method_of(entry: str, budget: int) -> Method:
    rules = {"h2o": H2O, "streaming_llm": StreamingLLM}
    rule = rules[entry](budget) if entry in rules else Full()
    return Method(entry, rule, Kivi(int(entry[-1]), int(entry[-1])) if entry.startswith("kivi") else DenseStore())


class RandomLayers(Sequence[LayerRecord]):
    """Random layers in place of a prefill, drawn on demand: never more than one is held."""

    def __init__(self, loaded: LoadedModel, cell: Cell, observations: tuple[Observation, ...]) -> None:
        self.loaded, self.cell, self.observations = loaded, cell, observations

    def __len__(self) -> int:
        return int(self.loaded.model.config.num_hidden_layers)

    def __getitem__(self, index: int) -> LayerRecord:
        if index >= len(self):
            raise IndexError(index)
        config, device, dtype = self.loaded.model.config, self.loaded.device, self.loaded.dtype
        lead = self.cell.batch, config.num_key_value_heads, self.cell.context
        key, value = (torch.randn(*lead, config.head_dim, device=device, dtype=dtype) for _ in "kv")
        observed = {o: torch.rand(lead, device=device) for o in self.observations if isinstance(o, ColumnSums)}
        return LayerRecord(index, key, value, Scoring(config.head_dim**-0.5), observed)


def random_cache(loaded: LoadedModel, cell: Cell, plan: Plan) -> KVCache:
    """A method's cache after a prompt of random keys and values."""
    method, config = method_of(cell.entry, plan.budget), loaded.model.config
    observations = method.rule.observations()
    ids = torch.zeros(cell.batch, cell.context, dtype=torch.int64, device=loaded.device)
    logits = torch.zeros(cell.batch, config.vocab_size, device=loaded.device, dtype=loaded.dtype)
    layers = RandomLayers(loaded, cell, observations)
    record = PrefillRecord(ids, logits, layers, 0.0, dict.fromkeys(observations, 0.0))
    cache = build_cache(loaded.model, method, record, max_new_tokens=WARM_UP + 1 + plan.steps)
    assert isinstance(cache, KVCache)
    return cache


Feed = Callable[[Tensor], object]


def ours(loaded: LoadedModel, cell: Cell, plan: Plan) -> tuple[Feed, int, str]:
    """A function that feeds a token, the bytes of cache that a step reads, and the kernel's name."""
    cache = random_cache(loaded, cell, plan)
    decoder = decoder_for(loaded.model, cache)
    mode = f"{cache.kernel_name}, graph" if decoder.is_graph else f"{cache.kernel_name}, {decoder.note or 'eager'}"
    return decoder.feed, held_bytes(cache.buffers()).used, mode


def static(loaded: LoadedModel, cell: Cell, plan: Plan) -> tuple[Feed, int, str]:
    """transformers' StaticCache under torch.compile, attention included; on a CPU the compiler is left out."""
    model, config = loaded.model, loaded.model.config
    cache = StaticCache(config=config, max_cache_len=cell.context + WARM_UP + 1 + plan.steps)
    arguments = {cache_argument(type(model).forward): cache, "use_cache": True, "logits_to_keep": 1}
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.zeros(cell.batch, 1, dtype=torch.int64, device=loaded.device), **arguments)
    for layer in cache.layers:
        layer.keys[:, :, : cell.context].normal_()
        layer.values[:, :, : cell.context].normal_()
        layer.cumulative_length.fill_(cell.context)
    on_gpu = loaded.device.type == "cuda"
    compiled = torch.compile(model.forward, **({"mode": "reduce-overhead"} if on_gpu else {"backend": "eager"}))
    read = sum(2 * layer.keys.nbytes * cell.context // layer.keys.shape[2] for layer in cache.layers)
    return lambda ids: compiled(input_ids=ids, **arguments), read, "StaticCache, torch.compile, SDPA"


def compile_the_rest(model: nn.Module, on_gpu: bool) -> None:
    """Feed-forward and norms under torch.compile; attention and the cache stay what they are."""
    for module in model.modules():
        if type(module).__name__.endswith(("MLP", "RMSNorm")):
            module.compile(**({} if on_gpu else {"backend": "eager"}))


def step_ms(feed: Feed, ids: Tensor, steps: int) -> list[float]:
    """Milliseconds of each timed step, synchronised on both sides."""
    for _ in range(WARM_UP + 1):
        feed(ids)
    took = []
    for _ in range(steps):
        started = clock(ids.device)
        feed(ids)
        took.append(1e3 * (clock(ids.device) - started))
    return took


@torch.inference_mode()
def measure(loaded: LoadedModel, cell: Cell, plan: Plan, bandwidth: float) -> dict[str, object]:
    ids = torch.zeros(cell.batch, 1, dtype=torch.int64, device=loaded.device)
    row: dict[str, object] = {
        "batch": cell.batch,
        "context": cell.context,
        "entry": cell.entry,
        "rest": "torch.compile" if cell.compiled else "eager",
    }
    try:
        if cell.compiled:
            compile_the_rest(loaded.model, loaded.device.type == "cuda")
        feed, cache_bytes, mode = (static if cell.entry == "StaticCache" else ours)(loaded, cell, plan)
        p50 = statistics.median(step_ms(feed, ids, plan.steps))
        bound = 1e3 * (read_bytes(loaded.model) + cache_bytes) / bandwidth
        row |= {"mode": mode, "tpot_p50_ms": p50, "cache_bytes": cache_bytes, "memory_ms": bound, "ratio": p50 / bound}
    except Exception as error:  # a failed cell must not stop the others
        row["error"] = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:160]}"
    return row


def rows_of(loaded: LoadedModel, plan: Plan, bandwidth: float) -> Iterator[dict[str, object]]:
    for cell in plan.cells:
        yield measure(loaded, cell, plan, bandwidth)
        if cell.compiled:
            for module in loaded.model.modules():
                module._compiled_call_impl = None
        gc.collect()
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()


def show(row: dict[str, object], console: Console) -> None:
    head = f"batch {row['batch']:>2} {row['context']:>7} {row['entry']:<14} rest {row['rest']:<13}"
    if "error" in row:
        console.print(f"{head} {row['error']}")
        return
    verdict = ""
    if (row["batch"], row["context"]) == (8, 65536) and row["entry"] != "StaticCache":
        verdict = f" (at most {MEMORY_BOUND}: {'met' if float(row['ratio']) <= MEMORY_BOUND else 'missed'})"
    console.print(
        f"{head} {row['tpot_p50_ms']:8.2f} ms, {row['ratio']:5.2f} x reading weights and cache"
        f"{verdict}   [{row['mode']}]",
        markup=False,
        highlight=False,
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=1e9, help="start no cell after that many")
    arguments = options.parse_args()
    started, device, console = time.monotonic(), device_of(arguments), Console(width=160)
    if device.type == "cpu":
        os.environ["KVBENCH_KERNEL"] = "reference"  # as on a machine without a GPU kernel
    plan, shape = (TINY_PLAN, TINY) if arguments.tiny else (FULL_PLAN, LLAMA)
    bandwidth = read_bandwidth(device)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    loaded = load_model(model_spec({"random": shape, "dtype": dtype, "device": str(device)}))
    label = "random weights, " + ("tiny" if arguments.tiny else "Llama-3.1-8B-shaped")
    weights = read_bytes(loaded.model) / 1e9
    console.print(
        f"{device_name(device)}, torch {torch.__version__}, {label}: {weights:.1f} GB of weights, "
        f"memory read at {bandwidth / 1e9:.0f} GB/s"
    )
    rows: list[dict[str, object]] = []
    for cell in plan.cells:
        if time.monotonic() - started > arguments.seconds:
            console.print(f"time is up: {len(plan.cells) - len(rows)} cells are left out")
            break
        rows += rows_of(loaded, replace(plan, cells=(cell,)), bandwidth)
        show(rows[-1], console)
        save(rows, arguments.out, device=device_name(device), model=label, read_gb_per_s=bandwidth / 1e9)
    return 0 if rows and not all("error" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
