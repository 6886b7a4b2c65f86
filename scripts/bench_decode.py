"""Decode end to end: our caches against transformers' own on one model, as ratios measured in one run.

    python scripts/bench_decode.py            # the offline model; some 20 minutes on 2 cores
    python scripts/bench_decode.py --quick    # shorter contexts, to see that it runs

Contenders decode in turns of 8 steps. A step is timed by the process's CPU time with one thread, which foreign load
hardly touches; `--threads 2` times walls instead.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from kvbench import load_method, load_model
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.decode import step
from kvbench.cache.forward import forward
from kvbench.cache.record import PrefillRecord
from kvbench.results.provenance import cpu_name
from kvbench.texts.load import load_text
from kvbench.texts.tokens import tokenize

TURN = 8


@dataclass
class Contender:
    """A cache in the comparison: `feed` decodes one token [B, 1]."""

    name: str
    feed: Callable[[Tensor], object]
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return sorted(self.ms)[len(self.ms) // 2]


class Bench:
    """The model, the text, and how a step is timed."""

    def __init__(self, threads: int, turns: int) -> None:
        torch.set_num_threads(threads)
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.turns = turns
        self.loaded = load_model("smollm2-135m")
        self.model = self.loaded.model
        self.tokens = tokenize(load_text({"name": "essays", "fetched": "essays"}), self.loaded.tokenizer)

    def prompt(self, context: int, batch: int = 1) -> Tensor:
        return torch.stack([self.tokens[i * context : (i + 1) * context] for i in range(batch)])

    def ours(self, name: str, entry: str, context: int, batch: int = 1, **knobs: object) -> Contender:
        """One of our caches after a prompt of `context` tokens."""
        method = load_method(entry, **knobs)
        record = prefill(self.model, self.prompt(context, batch), [method])
        cache = build_cache(self.model, method, record, max_new_tokens=(self.turns + 1) * TURN)
        return Contender(name, lambda ids: step(self.model, ids, cache))

    def stock(self, name: str, cache: DynamicCache, context: int) -> Contender:
        """One of transformers' caches after the same prompt, with the model's own attention."""
        with torch.inference_mode():
            forward(self.model, self.prompt(context), cache, 1)

        def feed(ids: Tensor) -> object:
            with torch.inference_mode():
                return forward(self.model, ids, cache, 1)

        return Contender(name, feed)

    def race(self, contenders: list[Contender]) -> None:
        """Decode in turns; the first turn of each is not counted."""
        for turn in range(self.turns + 1):
            for contender in contenders:
                for i in range(TURN):
                    ids = self.tokens[turn * TURN + i].view(1, 1)
                    started = self.clock()
                    contender.feed(ids)
                    if turn:
                        contender.ms.append(1e3 * (self.clock() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="contexts of hundreds of tokens, few steps")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    bench = Bench(options.threads, turns=2 if options.quick else 5)
    short, middle, long = (128, 256, 512) if options.quick else (2048, 4096, 8192 - 64)
    table = Table(title=f"decode on {cpu_name()}, {options.threads} thread(s), SmolLM2-135M in float32")
    for column in ("what", "measured", "target", "verdict"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def verdict(what: str, value: float, target: float, at_most: bool = True) -> None:
        met = value <= target if at_most else value >= target
        row = what, f"{value:.3f}", f"{'<=' if at_most else '>='} {target}", "met" if met else "MISSED"
        table.add_row(*row)
        print(" | ".join(row), flush=True)

    against_dynamic(bench, verdict, {middle: 0.8, long: 0.6})
    slopes(bench, verdict, short, long)
    against_quanto(bench, verdict, middle)
    for entry in ("h2o", "streaming_llm"):
        bounded(bench, verdict, entry, short, long, budget=64 if options.quick else 1000)
    batched(bench, verdict, context=short // 4, windows=8)
    compared(bench, verdict, context=short // 2, steps=16 if options.quick else 64)
    Console().print(table)


def against_dynamic(bench: Bench, verdict: Callable[..., None], targets: dict[int, float]) -> None:
    for context, target in targets.items():
        full, stock = bench.ours("full", "full", context), bench.stock("DynamicCache", DynamicCache(), context)
        bench.race([full, stock])
        verdict(
            f"TPOT full / DynamicCache at {context} ({full.median:.1f} / {stock.median:.1f} ms)",
            full.median / stock.median,
            target,
        )


def slopes(bench: Bench, verdict: Callable[..., None], low: int, high: int) -> None:
    """Growth of the step with context, between two that are both longer than any residual: all ends in one race."""
    entries = {"kivi4": "kivi4", "16-bit": "full+bf16", "fp32": "full"}
    runs = {(name, c): bench.ours(name, entry, c) for name, entry in entries.items() for c in (low, high)}
    bench.race(list(runs.values()))
    slope = {name: runs[name, high].median - runs[name, low].median for name in entries}
    verdict(f"TPOT slope, kivi4 / full in 16 bits ({low} to {high} tokens)", slope["kivi4"] / slope["16-bit"], 0.7)
    verdict(f"TPOT slope, kivi4 / full in float32 ({low} to {high} tokens)", slope["kivi4"] / slope["fp32"], 0.5)


def against_quanto(bench: Bench, verdict: Callable[..., None], context: int) -> None:
    try:
        from transformers.cache_utils import QuantizedCache

        def quanto() -> DynamicCache:
            cache: DynamicCache = QuantizedCache(
                backend="quanto", config=bench.model.config, nbits=4, q_group_size=32, residual_length=128
            )
            return cache

        runs = [bench.ours("kivi4", "kivi4", c) for c in (16, context)]
        runs += [bench.stock("quanto", quanto(), c) for c in (16, context)]
    except ImportError as error:
        print(f"transformers' quantised cache is left out: {' '.join(str(error).split())[:120]}")
        return
    bench.race(runs)
    ours, theirs = (runs[i + 1].median - runs[i].median for i in (0, 2))
    verdict(f"(TPOT at {context} - at 16), kivi4 / quanto 4-bit ({ours:.1f} / {theirs:.1f} ms)", ours / theirs, 0.2)


def bounded(bench: Bench, verdict: Callable[..., None], entry: str, short: int, long: int, budget: int) -> None:
    runs = [bench.ours(entry, entry, context, budget=budget) for context in (short, long)]
    bench.race(runs)
    verdict(f"{entry} budget {budget}: TPOT after {long} / after {short}", runs[1].median / runs[0].median, 1.05)


def batched(bench: Bench, verdict: Callable[..., None], context: int, windows: int) -> None:
    one, many = bench.ours("one", "full", context), bench.ours("many", "full", context, batch=windows)
    feed = many.feed
    many.feed = lambda ids: feed(ids.expand(windows, 1))
    bench.race([one, many])
    verdict(
        f"perplexity's decode, {windows} windows at once: tokens/s over one at a time",
        windows * one.median / many.median,
        3,
        at_most=False,
    )


EIGHT = ("full", "kivi4", "kivi2", "h2o", "streaming_llm", "snapkv", "tova", "random")


def compared(bench: Bench, verdict: Callable[..., None], context: int, steps: int) -> None:
    """Time of a comparison: one prefill with all observations, eight caches built, and their decodes."""
    budgets = {"budget": context // 4}
    methods = [load_method(entry, **({} if entry in ("full", "kivi4", "kivi2") else budgets)) for entry in EIGHT]
    prompt, following = bench.prompt(context), bench.tokens[:steps].view(-1, 1, 1)

    def decode(record: PrefillRecord, method: Method) -> float:
        cache = build_cache(bench.model, method, record, max_new_tokens=steps)
        started = bench.clock()
        for ids in following:
            step(bench.model, ids, cache)
        return bench.clock() - started

    decode(prefill(bench.model, prompt, methods), methods[0])  # nothing is compiled later
    started = bench.clock()
    prefill(bench.model, prompt)
    one_prefill = bench.clock() - started
    started = bench.clock()
    record = prefill(bench.model, prompt, methods)
    decodes = sum(decode(record, method) for method in methods)
    whole = bench.clock() - started
    verdict(
        f"compare of 8 methods over one prefill ({context} tokens) and {steps} steps of each",
        whole / (one_prefill + decodes),
        1.10,
    )


if __name__ == "__main__":
    main()
