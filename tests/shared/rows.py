"""Synthetic rows of a plausible comparison, for tests of results and report. None of the numbers is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvbench.results.row import Row

BASE = Row(
    model="org/Toy-135M",
    revision="abc",
    arch="gqa",
    kv_heads=3,
    converted=False,
    dataset="essays",
    batch=1,
    dtype="float32",
    device="cpu",
    kernel="reference",
    threads=2,
    seed=0,
)
# method, store, knobs, perplexity, share of the dense bytes held
METHODS: tuple[tuple[str, str, dict[str, Any], float, float], ...] = (
    ("full", "dense", {}, 22.31, 1.0),
    ("kivi8", "kivi8", {"bits": 8, "group": 32, "residual": 128}, 22.312, 0.33),
    ("kivi4", "kivi4", {"bits": 4, "group": 32, "residual": 128}, 22.41, 0.21),
    ("kivi2", "kivi2", {"bits": 2, "group": 32, "residual": 128}, 23.9, 0.145),
    ("h2o", "dense", {"budget": 256, "window": 128, "variant": "sum"}, 23.4, 0.25),
    ("h2o", "int4", {"budget": 256, "window": 128, "variant": "sum", "bits": 4}, 23.6, 0.08),
    ("streaming_llm", "dense", {"budget": 256, "sinks": 4, "variant": "cache"}, 24.6, 0.25),
    ("random", "dense", {"budget": 256, "window": 128}, 44.8, 0.25),
)


def rows(
    methods: Sequence[tuple[str, str, dict[str, Any], float, float]] = METHODS,
    measures: Sequence[str] = ("perplexity", "needle", "memory", "latency"),
    contexts: Sequence[int] = (512, 1024, 2048),
    lengths: Sequence[int] = (1024, 2048),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    base: Row = BASE,
) -> list[Row]:
    """Rows as the measures write them, for every method, measure, context, length and depth."""
    made: list[Row] = []
    for method, store, knobs, ppl, share in methods:
        start = replace(base, method=method, store=store, **knobs)
        if "perplexity" in measures:
            made += _perplexity(start, ppl, share)
        if "needle" in measures:
            made += _needle(start, ppl, lengths, depths)
        if "memory" in measures:
            made += [row for context in contexts for row in _memory(start, context, share)]
        if "latency" in measures:
            made += [row for context in contexts for row in _latency(start, context, share)]
            made += _numbers(start, {"slope_ms_per_1k": (6 * share, "ms")}, measure="latency")
    return made


def _numbers(start: Row, values: dict[str, tuple[float, str]], **where: Any) -> list[Row]:
    return [replace(start, metric=name, value=value, unit=unit, **where) for name, (value, unit) in values.items()]


def _counts(start: Row) -> dict[str, tuple[float, str]]:
    full = start.method == "full" and start.store == "dense"
    return {
        "engaged": (0.0 if full else 1.0, "share"),
        "kept_tokens": (start.budget or float(start.context or 0), "tokens"),
        "positions_processed": (128.0, "positions"),
    }


def _perplexity(start: Row, ppl: float, share: float) -> list[Row]:
    here = replace(start, measure="perplexity", context=1024, n=512, protocol="prefill_decode")
    difference = math.log(ppl / 22.31)
    low, high = difference - 0.01, difference + 0.01
    bounded = [
        replace(here, metric="ppl", value=ppl, unit="", low=ppl * 0.96, high=ppl * 1.05),
        replace(here, metric="nll_minus_full", value=difference, unit="nats", low=low, high=high),
    ]
    values = {"nll": (math.log(ppl), "nats"), "kl": (difference / 2, "nats"), "top1": (1 - difference / 4, "share")}
    held = share * 2.0 * 30 * 3 * 64 * 4 * 1088 * (here.batch or 1)
    scored = {"scored_bytes": (held, "bytes"), "x_smaller": (0.5 / share, "x")}
    return bounded + _numbers(here, values | scored | _counts(here))


def _needle(start: Row, ppl: float, lengths: Sequence[int], depths: Sequence[float]) -> Iterator[Row]:
    for length in lengths:
        here = replace(start, measure="needle", context=length, question="after", protocol="single_number")
        found = {depth: 4.0 if ppl < 23 else float(round(4 - 3 * depth)) for depth in depths}
        for depth, hits in found.items():
            there = replace(here, depth=depth, n=4)
            yield replace(there, metric="hit_rate", value=hits / 4, unit="share")
            yield replace(there, metric="hits", value=hits, unit="hits")
        pooled = replace(here, n=4 * len(depths))
        rate = sum(found.values()) / (4 * len(depths))
        yield replace(pooled, metric="hit_rate", value=rate, unit="share", low=rate * 0.7, high=min(1, rate * 1.2))
        yield replace(pooled, metric="hits", value=sum(found.values()), unit="hits")
        yield from _numbers(here, _counts(here))


def _memory(start: Row, context: int, share: float) -> list[Row]:
    here = replace(start, measure="memory", context=context, n=1)
    dense = 2.0 * 30 * 3 * 64 * 4 * context
    held = share * dense
    part = "codes" if start.bits else "dense"
    values = {
        "held_bytes": (held, "bytes"),
        "dense_bytes": (dense, "bytes"),
        "slack_bytes": (held / 50, "bytes"),
        "bits_per_value": (32 * share, "bits"),
        "x_smaller": (0.5 / share, "x"),
        "peak_prefill_bytes": (8e8, "bytes"),
        "peak_decode_bytes": (7e8, "bytes"),
        f"held_bytes.{part}": (0.9 * held, "bytes"),
        "held_bytes.scales": (0.1 * held, "bytes"),
    }
    return _numbers(here, values | _counts(here))


def _latency(start: Row, context: int, share: float) -> list[Row]:
    here = replace(start, measure="latency", context=context, n=64)
    step = 30 + 0.006 * context * share
    values = {
        "prefill_ms": (1.1 * context, "ms"),
        "observe_ms": (0.1 * context, "ms"),
        "compress_ms": (5.0, "ms"),
        "tpot_p50_ms": (step, "ms"),
        "tpot_p90_ms": (1.1 * step, "ms"),
        "tpot_p99_ms": (1.3 * step, "ms"),
        "bandwidth_share": (0.31, "share"),
    }
    return _numbers(here, values | _counts(here))
