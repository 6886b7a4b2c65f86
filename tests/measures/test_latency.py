"""Latency: how many steps are timed, in which turns, and what the rows are made of. No test looks at wall time."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from kvbench.cache import build
from kvbench.cache import prefill as prefill_module
from kvbench.cache.build import Method
from kvbench.cache.caches import RecomputeCache
from kvbench.cache.decode import generate
from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.store import DenseStore
from kvbench.measures.context import RunContext
from kvbench.measures.latency import Latency, machine
from kvbench.measures.latency import decode_times as measured
from kvbench.measures.latency import generation as generated
from kvbench.measures.latency import throughput as largest
from kvbench.measures.latency.decode_times import RECOMPUTE_STEPS, ROUND, batch_ids, is_steady, time_decoding
from kvbench.measures.latency.generation import FIXED
from kvbench.measures.latency.slope import slope
from kvbench.measures.latency.time_ratios import ratio_row
from kvbench.results.row import Row, flags_of
from tests.shared.models import random_llama
from tests.shared.text import Breaks, limit_prefill, methods, rows_of, run_context_of, value

CONTEXT = 40
MODEL = random_llama(4, 2, 16, dtype=torch.float32)
TEXT = torch.randint(97, (500,), generator=torch.Generator().manual_seed(1))


def settings(**changes: Any) -> Latency:
    return dataclasses.replace(Latency(contexts=[CONTEXT], steps=20, warmup=3), **changes)


def bench(named: dict[str, Method]) -> RunContext:
    return run_context_of(MODEL, named, TEXT)


def with_slopes(here: RunContext, asked: Latency) -> list[Row]:
    """The rows of all cells, all of them steady whatever this machine does, and those of the summaries over them."""
    rows = rows_of(time_decoding(here, asked))
    rows = [dataclasses.replace(row, value=1.0) if row.metric == "steady" else row for row in rows]
    for summary, method in itertools.product(asked.summaries(), here.methods):
        own = [row for row in rows if row.method == method.label and row.batch == summary.batches[0]]
        rows += summary.summarise(method, own)
    return rows


def metrics(rows: list[Row], method: str) -> dict[str | None, Row]:
    return {row.metric: row for row in rows if row.method == method}


@pytest.mark.parametrize(("steps", "warmup"), [(20, 3), (16, 0), (5, 1), (40, 8)])
def test_number_of_timed_steps(steps: int, warmup: int) -> None:
    rows = rows_of(time_decoding(bench(methods("full", "h2o", "recompute")), settings(steps=steps, warmup=warmup)))
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
    step = DecodeCache.step

    def spy(cache: DecodeCache, model: Any, ids: Any, logits_to_keep: int = 1) -> Any:
        caches.append(cache)
        fed.setdefault(id(cache), []).append(int(ids))
        return step(cache, model, ids, logits_to_keep)

    monkeypatch.setattr(DecodeCache, "step", spy)
    monkeypatch.setattr(measured, "_generations", lambda *_: [])
    rows_of(time_decoding(bench(methods("full", "h2o", "recompute")), settings(steps=40, warmup=3)))
    order = [(id(cache), len(list(run))) for cache, run in itertools.groupby(caches, key=lambda cache: cache)]
    full, h2o, recompute = dict.fromkeys(cache for cache, _ in order)
    assert ROUND == 16
    assert order == [
        (full, 3),
        (h2o, 3),
        (recompute, 1),
        (full, 16),
        (h2o, 16),
        (recompute, 16),
        (full, 16),
        (h2o, 16),
        (full, 8),
        (h2o, 8),
    ]
    assert fed[full] == fed[h2o] == TEXT[CONTEXT : CONTEXT + 43].tolist()
    assert fed[recompute] == TEXT[CONTEXT : CONTEXT + 17].tolist()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at the clock sees a second more than whoever looked before."""
    seconds = itertools.count()
    monkeypatch.setattr(measured, "clock", lambda device: float(next(seconds)))
    for module in (build, prefill_module):
        monkeypatch.setattr(module, "clock", lambda device: float(next(seconds)))


@pytest.fixture
def rising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock lies further behind the one before, so that steps take longer, context after context."""
    now = itertools.accumulate(itertools.count(1000), lambda time, step: time + step)
    monkeypatch.setattr(measured, "clock", lambda device: float(next(now)))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("warmup", [0, 3])
def test_what_the_times_are_made_of(warmup: int) -> None:
    rows = rows_of(time_decoding(bench(methods("full", "h2o", "recompute")), settings(warmup=warmup)))
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
    rows = with_slopes(bench(methods("full", "h2o")), settings(contexts=[16, 32, 64]))
    for method in ("full", "h2o"):
        assert value(rows, method, "slope_ms_per_1k") == pytest.approx(0, abs=1e-6)


def test_slope_is_a_line_through_the_medians(rising: None) -> None:
    rows = with_slopes(bench(methods("full", "h2o")), settings(contexts=[16, 32, 64]))
    for method in ("full", "h2o"):
        medians = [value(rows, method, "tpot_p50_ms", context=context) for context in (16, 32, 64)]
        (row,) = (row for row in rows if row.method == method and row.metric == "slope_ms_per_1k")
        assert row.value == pytest.approx(1000 * np.polyfit([16, 32, 64], medians, 1)[0])
        assert (row.n, row.context, row.unit) == (3, None, "ms")
        assert row.low is not None and row.high is not None and row.low <= row.value <= row.high
        assert (row.note or "").startswith("slope over contexts 16, 32, 64; 95%")


def timed_at(context: int, median: float, *, half: float = 1.0, engaged: float = 1.0, steady: float = 1.0) -> list[Row]:
    """Rows of one method at one context, as `time_decoding` writes them."""
    base = Row(method="h2o", store="dense", measure="latency", context=context, batch=1)
    return [
        dataclasses.replace(base, metric="tpot_p50_ms", value=median, low=median - half, high=median + half),
        dataclasses.replace(base, metric="engaged", value=engaged),
        dataclasses.replace(base, metric="steady", value=steady),
    ]


def slope_of(*contexts: list[Row], method: str = "h2o") -> Row:
    here = bench(methods("full", "h2o"))
    (one,) = (one for one in here.methods if one.label == method)
    (row,) = slope(one, list(itertools.chain(*contexts)))
    return row


def test_slope_leaves_out_contexts_that_were_not_engaged_or_not_steady() -> None:
    """A bounded cache at a context that it holds whole: its time is the full cache's there, and makes a slope."""
    idle = timed_at(500, 5.0, engaged=0.0)
    two = slope_of(idle, timed_at(1000, 20.0), timed_at(2000, 22.0))
    assert (two.value, two.n, two.flags) == (pytest.approx(2.0), 2, None)
    assert (two.note or "").startswith("slope over contexts 1000, 2000 (nothing was evicted or quantised at 500)")
    unsteady = slope_of(timed_at(500, 5.0, steady=0.0), timed_at(1000, 20.0), timed_at(2000, 22.0))
    assert unsteady.value == pytest.approx(2.0) and "(timing not steady at 500)" in (unsteady.note or "")
    one = slope_of(idle, timed_at(1000, 20.0), timed_at(2000, 22.0, steady=0.0))
    assert one.value is None and flags_of(one) == {"not_computed"} and one.status == "ok"
    assert (one.note or "").startswith("no slope: it needs 2 contexts, 1 can be used")
    # The full cache evicts nothing by design, so none of its contexts is left out.
    assert slope_of(idle, timed_at(1000, 20.0), method="full").n == 2


def test_interval_of_a_slope_covers_the_truth_and_follows_the_medians() -> None:
    """Medians drawn round a line with a known slope: 95% intervals of the medians give 95% intervals of the slope."""
    draw, misses = np.random.default_rng(0), 0
    for _ in range(400):
        points = [(c, 10 + 3 * c / 1000 + draw.normal(0, 0.5)) for c in (512, 2048, 4096)]
        row = slope_of(*(timed_at(c, y, half=1.96 * 0.5) for c, y in points))
        assert row.low is not None and row.high is not None
        misses += not row.low <= 3 <= row.high
    assert 0.005 <= misses / 400 <= 0.07
    wide, narrow = (slope_of(timed_at(100, 5, half=h), timed_at(1100, 6, half=h)) for h in (2.0, 1.0))
    assert wide.high - wide.low == pytest.approx(2 * (narrow.high - narrow.low))  # type: ignore[operator]
    (median, *rest) = timed_at(100, 5.0)
    bare = slope_of([dataclasses.replace(median, low=None, high=None), *rest], timed_at(1100, 6.0))
    assert (bare.value, bare.low, bare.high) == (pytest.approx(1.0), None, None)


def test_a_slope_that_the_machines_drift_made_is_not_shown() -> None:
    """Contexts are timed one after the other. A step over more tokens does not become faster."""
    falling = slope_of(timed_at(128, 72.0), timed_at(256, 48.0))
    assert falling.value is None and flags_of(falling) == {"not_computed"}
    assert (falling.note or "").startswith("no slope: times fall as the context grows (-188 ms per 1,000 tokens)")
    flat = slope_of(timed_at(1000, 20.5), timed_at(2000, 20.0))
    assert flat.value == pytest.approx(-0.5) and flat.low is not None and flat.low < 0 < (flat.high or 0)
    # Three contexts that lie on no line: the interval grows with their scatter.
    on, off = (slope_of(*(timed_at(c, y) for c, y in ((1000, 20.0), (2000, m), (3000, 24.0)))) for m in (22.0, 30.0))
    assert on.value == off.value and off.high - off.low > 5 * (on.high - on.low)  # type: ignore[operator]


# time over the full cache's


def test_every_method_has_its_time_over_the_full_caches_of_the_same_turns() -> None:
    rows = rows_of(time_decoding(bench(methods("full", "h2o", "recompute")), settings()))
    for method in ("full", "h2o", "recompute"):
        row = metrics(rows, method)["tpot_to_full"]
        assert row.unit == "x" and row.n == metrics(rows, method)["tpot_p50_ms"].n
        assert row.low is not None and row.high is not None and row.low <= row.value <= row.high  # type: ignore[operator]
    ratio = value(rows, "h2o", "tpot_p50_ms") / value(rows, "full", "tpot_p50_ms")
    assert value(rows, "h2o", "tpot_to_full") == pytest.approx(ratio)
    full = metrics(rows, "full")["tpot_to_full"]
    assert (full.low, full.value, full.high) == (1, 1, 1)


def test_a_drift_that_both_share_does_not_widen_the_ratio() -> None:
    draw = np.random.default_rng(0)
    drift = np.linspace(1, 3, 48)
    full, mine = (drift * scale * draw.normal(1, 0.01, 48) for scale in (10.0, 15.0))
    row = ratio_row(Row(), mine.tolist(), full.tolist(), seed=0)
    assert row.low <= 1.5 <= row.high and row.high - row.low < 0.1  # type: ignore[operator]
    shuffled = ratio_row(Row(), mine.tolist(), draw.permutation(full).tolist(), seed=0)
    assert shuffled.high - shuffled.low > 5 * (row.high - row.low)  # type: ignore[operator]


def test_without_a_full_cache_beside_there_is_no_ratio() -> None:
    here = bench(methods("full", "h2o"))
    rows = rows_of(time_decoding(dataclasses.replace(here, methods=here.methods[1:]), settings()))
    assert metrics(rows, "h2o")["tpot_p50_ms"].value
    assert "tpot_to_full" not in {row.metric for row in rows}


def test_one_context_has_no_slope() -> None:
    rows = with_slopes(bench(methods("full")), settings())
    assert not [row for row in rows if row.metric == "slope_ms_per_1k"]


def test_rows_say_what_was_timed() -> None:
    rows = rows_of(time_decoding(bench(methods("full", "h2o", "kivi", "recompute")), settings()))
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


def test_bytes_read_a_step_are_the_weights_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "read_bandwidth", lambda device: 2e9)
    rows = rows_of(time_decoding(bench(methods("full", "recompute")), settings()))
    kept = CONTEXT + 23
    cache = 2 * 2 * 2 * kept * 16 * 4 + 2 * kept * 4  # keys and values, then a position a token and layer
    # A step reads all weights but the input embedding, of which it looks up a row a token: here it is not the head.
    weights = sum(p.numel() * 4 for name, p in MODEL.named_parameters() if "embed_tokens" not in name)
    assert machine.read_bytes(MODEL) == weights
    rate = value(rows, "full", "bytes_per_s")
    assert rate == pytest.approx((weights + cache) / 1e-3 / value(rows, "full", "tpot_p50_ms"))
    assert value(rows, "full", "bandwidth_share") == pytest.approx(rate / 2e9)
    assert metrics(rows, "recompute").keys().isdisjoint({"bytes_per_s", "bandwidth_share"})


def test_a_head_that_shares_its_weights_with_the_embedding_is_read() -> None:
    config = copy.deepcopy(MODEL.config)
    config.tie_word_embeddings = True
    tied = LlamaForCausalLM(config)
    assert machine.read_bytes(tied) == sum(p.numel() * 4 for p in tied.parameters())


def test_the_bandwidth_of_reading_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 2**22)
    machine._read_bandwidth.cache_clear()
    seconds = itertools.count(step=0.5)
    monkeypatch.setattr(machine, "clock", lambda device: next(seconds))
    assert machine.read_bandwidth(torch.device("cpu")) == 2**23
    assert machine.read_bandwidth(torch.device("cpu")) == 2**23
    assert next(seconds) == 4.0  # four passes, two looks at the clock each
    machine._read_bandwidth.cache_clear()


@pytest.mark.parametrize(
    ("times", "steady"),
    [
        ([10.0] * 20, True),
        ([10.0] * 10 + [10.9] * 10, True),  # within ten percent
        ([10.0] * 10 + [11.2] * 10, False),
        ([13.0, 10.0] * 5 + [14.0, 11.5] * 5, True),  # the intervals overlap
        ([11.5, 10.0] * 5 + [22.0, 20.0] * 5, False),
        ([10.0, 20.0, 30.0], True),  # too few to tell
    ],
)
def test_steady(times: list[float], steady: bool) -> None:
    assert is_steady(times, 0) is steady
    assert is_steady(times[::-1], 0) is steady


def test_an_unsteady_run_is_flagged_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes slower with every step."""
    now = itertools.accumulate(itertools.count(1), lambda time, i: time + i)
    monkeypatch.setattr(measured, "clock", lambda device: float(next(now)))
    rows = rows_of(time_decoding(bench(methods("full")), settings()))
    assert value(rows, "full", "steady") == 0
    flagged = {row.metric for row in rows if "unsteady" in flags_of(row)}
    assert flagged >= {"tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms", "bytes_per_s", "steady"}


@pytest.mark.usefixtures("ticking")
def test_a_steady_run_says_so_and_its_percentiles_have_intervals() -> None:
    rows = rows_of(time_decoding(bench(methods("full")), settings()))
    assert value(rows, "full", "steady") == 1
    for percent in (50, 90, 99):
        row = metrics(rows, "full")[f"tpot_p{percent}_ms"]
        assert (row.low, row.value, row.high, row.note) == (1000, 1000, 1000, None)


def test_load_and_clock_stand_beside_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.5, 0, 0))
    clocks = {"min": 1500.0, "max": 3000.0, "limit": 3000.0}
    monkeypatch.setattr(machine.provenance, "cpu_clock_mhz", lambda: clocks)
    rows = rows_of(time_decoding(bench(methods("full")), settings()))
    assert value(rows, "full", "load_average") == 3.5
    assert value(rows, "full", "clock_mhz") == 1500
    assert "throttled: a core at 1500 MHz" in (metrics(rows, "full")["tpot_p50_ms"].note or "")


def test_a_throttled_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        {"uuid": "GPU-aa", "clock_sm_mhz": "1980", "throttle_reasons": "0x0000000000000001"},
        {"uuid": "GPU-bb", "clock_sm_mhz": "900", "throttle_reasons": "0x0000000000000004"},
    ]
    monkeypatch.setattr(machine.provenance, "gpus", lambda: gpus)
    found = {}
    for uuid in ("aa", "bb", "cc"):
        properties = type("Properties", (), {"uuid": uuid})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        found[uuid] = machine.machine_now(torch.device("cuda", 0))
    assert (found["aa"].clock_mhz, found["aa"].note) == (1980, "")  # bit 1: it has nothing to do
    assert (found["bb"].clock_mhz, found["bb"].note) == (900, "throttled: nvidia-smi says 0x0000000000000004")
    assert (found["cc"].clock_mhz, found["cc"].note) == (None, "")


# batches


def test_a_grid_of_batches(monkeypatch: pytest.MonkeyPatch, rising: None) -> None:
    monkeypatch.setattr(measured, "read_bandwidth", lambda device: 1e9)
    rows = with_slopes(bench(methods("full", "h2o")), settings(contexts=[20, 40], batches=[1, 3]))
    for method in ("full", "h2o"):
        for context, batch in itertools.product((20, 40), (1, 3)):
            assert value(rows, method, "positions_processed", context=context, batch=batch) == context + 23
        slopes = [row for row in rows if row.metric == "slope_ms_per_1k" and row.method == method]
        assert [row.batch for row in slopes] == [1, 3]
        for row in slopes:
            medians = [value(rows, method, "tpot_p50_ms", context=c, batch=row.batch) for c in (20, 40)]
            assert row.value == pytest.approx(1000 * np.polyfit([20, 40], medians, 1)[0])
    # Three caches hold, and a step reads, three times as much.
    read = {
        batch: value(rows, "full", "bytes_per_s", context=40, batch=batch)
        / 1e3
        * value(rows, "full", "tpot_p50_ms", context=40, batch=batch)
        for batch in (1, 3)
    }
    assert read[3] - read[1] == pytest.approx(2 * 2 * 2 * 2 * 63 * 16 * 4)


def test_rows_of_a_batch_are_different_texts() -> None:
    ids = batch_ids(bench(methods("full")), 4, 40)
    assert ids.shape == (4, 40)
    assert [TEXT.tolist().index(row[0]) >= 0 for row in ids.tolist()] and len({tuple(row) for row in ids.tolist()}) == 4


def test_what_is_measured_apart() -> None:
    parts = settings(contexts=[20, 40], batches=[1, 4], throughput=True).cells()
    assert [(p.contexts, p.batches, p.throughput) for p in parts] == [  # type: ignore[union-attr]
        ([20], [1], False),
        ([20], [4], False),
        ([20], [], True),
        ([40], [1], False),
        ([40], [4], False),
        ([40], [], True),
    ]


# generation


def two_seconds_a_step(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """The clock of a generation moves with its steps alone; `look` sees ids and logits of each."""
    now = [0.0]
    decoder_for = generated.decoder_for

    def made(*args: Any) -> Any:
        decoder = decoder_for(*args)
        feed = decoder.feed

        def slow(ids: torch.Tensor) -> torch.Tensor:
            now[0] += 2.0
            return look(ids, feed(ids))

        monkeypatch.setattr(decoder, "feed", slow)
        return decoder

    monkeypatch.setattr(generated, "decoder_for", made)
    monkeypatch.setattr(generated, "clock", lambda device: now[0])


def test_itl_is_the_time_between_tokens_of_a_greedy_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves with every step alone: two seconds each."""
    fed: list[int] = []

    def note(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        fed.extend(ids[0].tolist())
        return logits

    two_seconds_a_step(monkeypatch, note)
    rows = rows_of(time_decoding(bench(methods("full")), settings()))
    row = metrics(rows, "full")["itl_p50_ms"]
    assert (row.value, row.n, row.low, row.high) == (2000, FIXED, 2000, 2000)
    expected = generate(MODEL, None, build.build_cache(MODEL, methods("full")["full"], TEXT[None, :CONTEXT]), FIXED)
    assert fed == expected[0].tolist()
    assert metrics(rows, "full").keys().isdisjoint({"natural_ms", "natural_itl_p50_ms", "natural_tokens"})


@pytest.mark.parametrize(("end", "most", "tokens", "ended"), [(5, 40, 5, 1), (30, 40, 30, 1), (30, 20, 20, 0)])
def test_the_natural_end(end: int, most: int, tokens: int, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = itertools.count(1)

    def ending(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., 96] = 1e9 if next(said) == end - 1 else -1e9  # the first token comes from the prompt
        return logits

    assert MODEL(TEXT[None, :CONTEXT]).logits[0, -1].argmax() != 96
    monkeypatch.setattr(generated, "end_tokens", lambda bench: [96])
    two_seconds_a_step(monkeypatch, ending)
    rows = rows_of(time_decoding(bench(methods("full")), settings(tokens_natural=most)))
    found = metrics(rows, "full")
    assert found["natural_tokens"].value == tokens
    assert found["natural_ms"].value == 2000 * (tokens - 1)
    assert (found["natural_itl_p50_ms"].value, found["natural_itl_p50_ms"].n) == (2000, tokens - 1)
    assert f"{ended} of 1 ended by themselves" in (found["natural_tokens"].note or "")
    assert found["itl_p50_ms"].n == FIXED


# throughput


def test_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = largest.prefill

    def small_device(model: Any, ids: Any, *rest: Any) -> Any:
        if ids.shape[0] > 5:
            raise torch.OutOfMemoryError("too many")
        return prefill(model, ids, *rest)

    monkeypatch.setattr(largest, "prefill", small_device)
    seconds = itertools.count(step=0.5)
    monkeypatch.setattr(largest, "clock", lambda device: next(seconds))
    here = bench(methods("full", "h2o", "recompute"))
    rows = rows_of(time_decoding(here, settings(batches=[], throughput=True)))
    assert [(row.method, row.metric, row.batch, row.value) for row in rows] == [
        ("full", "tokens_per_s", 4, 8.0),
        ("h2o", "tokens_per_s", 4, 8.0),
    ]
    assert all("8 ran out of memory" in (row.note or "") and row.kernel for row in rows)
    assert not here.journal.failures


def test_the_search_ends_where_the_host_would_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = 2 * 2 * 2 * 16 * 4 * CONTEXT  # of one prompt
    memory = type("Memory", (), {"available": 3 * dense * 3})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    (row,) = rows_of(time_decoding(bench(methods("full")), settings(batches=[], throughput=True)))
    assert row.batch == 2 and "4 would not fit" in (row.note or "")


def test_where_not_even_one_prompt_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "_has_room", lambda *_: False)
    here = bench(methods("full"))
    assert rows_of(time_decoding(here, settings(batches=[], throughput=True))) == []
    assert [(row.status, row.context) for _, row in here.journal.failures] == [("oom", CONTEXT)]


# failures


@pytest.mark.parametrize("how", ["failed", "oom"])
def test_a_method_that_breaks_in_the_middle_leaves_the_others_whole(how: str, rising: None) -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=CONTEXT + 4), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = with_slopes(here, settings(contexts=[20, CONTEXT, 60]))
    for method in ("full", "h2o"):
        for context in (20, CONTEXT, 60):
            assert value(rows, method, "positions_processed", context=context) == context + 23
        assert metrics(rows, method)["slope_ms_per_1k"].n == 3
    # 20 + 23 tokens do not reach the position where it breaks; 60 begin beyond it.
    assert {row.context for row in rows if row.method == "breaks" and row.metric != "slope_ms_per_1k"} == {20, 60}
    assert (metrics(rows, "breaks")["slope_ms_per_1k"].note or "").startswith("slope over contexts 20, 60;")
    ((label, row),) = here.journal.failures
    assert (label, row.measure, row.context, row.status) == ("breaks", "latency", CONTEXT, how)
    assert row.note is not None and f"broken at position {CONTEXT + 4}" in row.note


def test_a_method_that_breaks_while_its_cache_is_built() -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how="failed", at=CONTEXT - 1), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(time_decoding(here, settings()))
    assert {row.method for row in rows} == {"full", "h2o"}
    assert [label for label, _ in here.journal.failures] == ["breaks"]


def test_a_prefill_that_fails_is_a_row_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_prefill(monkeypatch, measured, CONTEXT)
    here = bench(methods("full", "h2o"))
    rows = rows_of(time_decoding(here, settings(contexts=[20, CONTEXT])))
    assert {(row.method, row.context) for row in rows} == {("full", 20), ("h2o", 20)}
    assert [(label, row.status, row.context) for label, row in here.journal.failures] == [
        ("full", "oom", CONTEXT),
        ("h2o", "oom", CONTEXT),
    ]


def test_recompute_carries_ids_and_nothing_else() -> None:
    method = methods("recompute")["recompute"]
    cache = build.build_cache(MODEL, method, TEXT[None, :4])
    assert isinstance(cache, RecomputeCache)
    assert list(cache.buffers()) == []


def test_without_memory_to_read_only_the_share_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(machine.torch, "ones", refuse)
    machine._read_bandwidth.cache_clear()
    assert machine.read_bandwidth(torch.device("cpu")) is None
    machine._read_bandwidth.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(measured, "read_bandwidth", lambda device: None)
    rows = rows_of(time_decoding(bench(methods("full")), settings(contexts=[CONTEXT])))
    assert {"bytes_per_s", "tpot_p50_ms"} <= {row.metric for row in rows}
    assert "bandwidth_share" not in {row.metric for row in rows}


def test_the_time_of_a_chunked_prefill_is_its_own() -> None:
    """Its forwards and its evictions; the observations of the shared record are none of it."""
    named = methods("full", "h2o")
    named["chunked"] = dataclasses.replace(named["h2o"], prefill_chunk=8)
    rows = rows_of(time_decoding(run_context_of(MODEL, named, TEXT), Latency(contexts=[32], steps=2, warmup=1)))
    prefill_ms = {method: value(rows, method, "prefill_ms") for method in named}
    assert prefill_ms["full"] == prefill_ms["h2o"] != prefill_ms["chunked"]
    assert value(rows, "h2o", "observe_ms") > value(rows, "chunked", "observe_ms") == 0
    total = sum(value(rows, "chunked", metric) for metric in ("prefill_ms", "compress_ms"))
    assert value(rows, "chunked", "ttft_ms") > total > prefill_ms["chunked"]
