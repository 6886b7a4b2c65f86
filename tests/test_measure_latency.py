"""Latency: how many steps are timed, in which turns, and what the rows are made of. No test looks at wall time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvbench import graph
from kvbench.cache import build
from kvbench.cache.build import Method, PrefixCache
from kvbench.cache.store import DenseStore
from kvbench.measure import latency as measured
from kvbench.measure.bench import Bench
from kvbench.measure.latency import RECOMPUTE_STEPS, ROUND, latency, weight_bytes
from kvbench.results import Row
from kvbench.settings import Latency
from tests.models import random_llama
from tests.text import Breaks, bench_of, light, methods, rows_of, value

CONTEXT = 40
MODEL = random_llama(4, 2, 16, dtype=torch.float32)
TEXT = torch.randint(97, (500,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with light():
        yield


def settings(**changes: Any) -> Latency:
    return dataclasses.replace(Latency(contexts=[CONTEXT], steps=20, warmup=3), **changes)


def bench(named: dict[str, Method]) -> Bench:
    return bench_of(MODEL, named, TEXT)


def metrics(rows: list[Row], method: str) -> dict[str | None, Row]:
    return {row.metric: row for row in rows if row.method == method}


@pytest.mark.parametrize(("steps", "warmup"), [(20, 3), (16, 0), (5, 1), (40, 8)])
def test_number_of_timed_steps(steps: int, warmup: int) -> None:
    rows = rows_of(latency(bench(methods("full", "h2o", "recompute")), settings(steps=steps, warmup=warmup)))
    for method in ("full", "h2o"):
        found = metrics(rows, method)
        assert {found[f"tpot_p{p}_ms"].n for p in (50, 90, 99)} == {steps}
        assert found["positions_processed"].value == CONTEXT + warmup + steps
    timed = metrics(rows, "recompute")["tpot_p50_ms"].n
    assert timed == min(steps, RECOMPUTE_STEPS)
    # One step warms it up where there is a warm-up at all: every step costs a whole prefill.
    last = CONTEXT + timed + (warmup > 0)
    assert metrics(rows, "recompute")["positions_processed"].value == sum(range(CONTEXT, last + 1))


def test_methods_take_turns_of_sixteen_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[object] = []
    fed: dict[int, list[int]] = {}
    step = graph.step

    def spy(model: Any, ids: Any, cache: Any) -> Any:
        caches.append(cache)
        fed.setdefault(id(cache), []).append(int(ids))
        return step(model, ids, cache)

    monkeypatch.setattr(graph, "step", spy)
    rows_of(latency(bench(methods("full", "h2o", "recompute")), settings(steps=40, warmup=3)))
    order = [(id(cache), len(list(run))) for cache, run in itertools.groupby(caches, key=lambda cache: cache)]
    full, h2o, recompute = dict.fromkeys(cache for cache, _ in order)
    assert ROUND == 16
    assert order == [
        (full, 3), (h2o, 3), (recompute, 1),
        (full, 16), (h2o, 16), (recompute, 16),
        (full, 16), (h2o, 16),
        (full, 8), (h2o, 8),
    ]  # fmt: skip
    assert fed[full] == fed[h2o] == TEXT[CONTEXT : CONTEXT + 43].tolist()
    assert fed[recompute] == TEXT[CONTEXT : CONTEXT + 17].tolist()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at the clock sees a second more than whoever looked before."""
    seconds = itertools.count()
    monkeypatch.setattr(measured, "clock", lambda device: float(next(seconds)))
    monkeypatch.setattr(build, "clock", lambda device: float(next(seconds)))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("warmup", [0, 3])
def test_what_the_times_are_made_of(warmup: int) -> None:
    rows = rows_of(latency(bench(methods("full", "h2o", "recompute")), settings(warmup=warmup)))
    for method in ("full", "h2o", "recompute"):
        found = {metric: row.value for metric, row in metrics(rows, method).items()}
        # A step is timed from just before it to just after it, with nothing in between that looks at the clock.
        assert [found[f"tpot_p{p}_ms"] for p in (50, 90, 99)] == [1000, 1000, 1000]
        once = (found["prefill_ms"], found["observe_ms"], found["compress_ms"])
        assert found["ttft_ms"] == pytest.approx(sum(v for v in once if v is not None) + 1000)
        assert found["compress_ms"] == (0 if method == "recompute" else 1000)
    # One prefill for all; its time is that without the observations, which are h2o's alone.
    assert len({row.value for row in rows if row.metric == "prefill_ms"}) == 1
    observe = {method: metrics(rows, method)["observe_ms"].value for method in ("full", "h2o", "recompute")}
    assert observe["full"] == observe["recompute"] == 0
    assert observe["h2o"] is not None and observe["h2o"] > 0
    total = metrics(rows, "h2o")["prefill_ms"].value + observe["h2o"]  # type: ignore[operator]
    assert total == pytest.approx(1000)


@pytest.mark.usefixtures("ticking")
def test_slope_over_equal_times_is_flat() -> None:
    rows = rows_of(latency(bench(methods("full", "h2o")), settings(contexts=[16, 32, 64])))
    for method in ("full", "h2o"):
        assert value(rows, method, "slope_ms_per_1k") == pytest.approx(0, abs=1e-6)


def test_slope_is_a_line_through_the_medians() -> None:
    rows = rows_of(latency(bench(methods("full", "h2o")), settings(contexts=[16, 32, 64])))
    for method in ("full", "h2o"):
        medians = [value(rows, method, "tpot_p50_ms", context=context) for context in (16, 32, 64)]
        (row,) = (row for row in rows if row.method == method and row.metric == "slope_ms_per_1k")
        assert row.value == pytest.approx(1000 * np.polyfit([16, 32, 64], medians, 1)[0])
        assert (row.n, row.context, row.unit) == (3, None, "ms")
        assert row.note == "contexts 16, 32, 64"


def test_one_context_has_no_slope() -> None:
    rows = rows_of(latency(bench(methods("full")), settings()))
    assert not [row for row in rows if row.metric == "slope_ms_per_1k"]


def test_rows_say_what_was_timed() -> None:
    rows = rows_of(latency(bench(methods("full", "h2o", "kivi", "recompute")), settings()))
    assert {(row.measure, row.context, row.batch, row.protocol) for row in rows} == {
        ("latency", CONTEXT, 1, "interleaved")
    }
    assert all(row.kernel for row in rows)
    engaged = {method: value(rows, method, "engaged") for method in ("full", "h2o", "kivi", "recompute")}
    assert engaged == {"full": 0, "h2o": 1, "kivi": 1, "recompute": 0}
    assert value(rows, "h2o", "kept_tokens") == 12
    assert value(rows, "full", "kept_tokens") == CONTEXT + 23
    for method in ("full", "h2o"):
        p50, p90, p99 = (value(rows, method, f"tpot_p{p}_ms") for p in (50, 90, 99))
        assert 0 < p50 <= p90 <= p99


def test_bytes_read_a_step_are_the_weights_and_what_is_kept() -> None:
    rows = rows_of(latency(bench(methods("full", "recompute")), settings()))
    kept = CONTEXT + 23
    cache = 2 * 2 * 2 * kept * 16 * 4 + 2 * kept * 4  # keys and values, then a position a token and layer
    weights = sum(p.numel() * 4 for p in MODEL.parameters())
    assert weight_bytes(MODEL) == weights
    rate = value(rows, "full", "read_gb_per_s")
    assert rate == pytest.approx((weights + cache) / 1e6 / value(rows, "full", "tpot_p50_ms"))
    assert "read_gb_per_s" not in metrics(rows, "recompute")


# failures


@pytest.mark.parametrize("how", ["failed", "oom"])
def test_a_method_that_breaks_in_the_middle_leaves_the_others_whole(how: str) -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=CONTEXT + 4), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(latency(here, settings(contexts=[20, CONTEXT, 60])))
    for method in ("full", "h2o"):
        for context in (20, CONTEXT, 60):
            assert value(rows, method, "positions_processed", context=context) == context + 23
        assert metrics(rows, method)["slope_ms_per_1k"].n == 3
    # 20 + 23 tokens do not reach the position where it breaks; 60 begin beyond it.
    assert {row.context for row in rows if row.method == "breaks" and row.metric != "slope_ms_per_1k"} == {20, 60}
    assert metrics(rows, "breaks")["slope_ms_per_1k"].note == "contexts 20, 60"
    ((label, row),) = here.failures
    assert (label, row.measure, row.context, row.status) == ("breaks", "latency", CONTEXT, how)
    assert row.note is not None and f"broken at position {CONTEXT + 4}" in row.note


def test_a_method_that_breaks_while_its_cache_is_built() -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how="failed", at=CONTEXT - 1), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(latency(here, settings()))
    assert {row.method for row in rows} == {"full", "h2o"}
    assert [label for label, _ in here.failures] == ["breaks"]


def test_a_prefill_that_fails_is_a_row_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = measured.prefill

    def too_long(model: Any, ids: Any, *rules: Any) -> Any:
        if ids.shape[1] >= CONTEXT:
            raise torch.OutOfMemoryError("too long")
        return prefill(model, ids, *rules)

    monkeypatch.setattr(measured, "prefill", too_long)
    here = bench(methods("full", "h2o"))
    rows = rows_of(latency(here, settings(contexts=[20, CONTEXT])))
    assert {(row.method, row.context) for row in rows} == {("full", 20), ("h2o", 20)}
    assert [(label, row.status, row.context) for label, row in here.failures] == [
        ("full", "oom", CONTEXT), ("h2o", "oom", CONTEXT),
    ]  # fmt: skip


def test_recompute_carries_ids_and_nothing_else() -> None:
    method = methods("recompute")["recompute"]
    cache = build.build_cache(MODEL, method, TEXT[None, :4])
    assert isinstance(cache, PrefixCache)
    assert list(cache.buffers()) == []
