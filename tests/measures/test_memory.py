"""Memory: bytes by hand, parts that sum, and peaks that see what was allocated and freed in between."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch

from kvbench.cache.build import Method
from kvbench.cache.bytes import allocator_bytes, held_bytes
from kvbench.cache.store import Buffer, DenseStore
from kvbench.measures.context import RunContext
from kvbench.measures.memory import Memory
from kvbench.measures.memory import cache_bytes as measured
from kvbench.measures.memory import peak as peaks
from kvbench.measures.memory.cache_bytes import measure_bytes
from kvbench.measures.memory.peak import peak
from kvbench.models.checkpoint import ModelSpec
from kvbench.models.load import load_model
from kvbench.results.row import Row
from tests.shared.families import tiny
from tests.shared.models import random_llama
from tests.shared.text import Breaks, methods, rows_of, run_context_of, value

CONTEXT, TOKENS = 40, 4
SEEN = CONTEXT + TOKENS
LAYERS, KV_HEADS, HEAD = 2, 2, 16
MODEL = random_llama(4, KV_HEADS, HEAD, layers=LAYERS, dtype=torch.float32)
TEXT = torch.randint(97, (500,), generator=torch.Generator().manual_seed(1))
MIB = 2**20


def bench(named: dict[str, Method], model: Any = MODEL) -> RunContext:
    return run_context_of(model, named, TEXT)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    here = bench(methods("full", "h2o", "kivi", "recompute", "streaming_llm", budget=10))
    return rows_of(measure_bytes(here, Memory([CONTEXT], TOKENS)))


def parts(rows: list[Row], method: str) -> dict[str, float]:
    return {
        row.metric.removeprefix("held_bytes."): row.value
        for row in rows
        if row.method == method and row.metric and row.value is not None and row.metric.startswith("held_bytes.")
    }


def test_bytes_by_token_and_layer(rows: list[Row]) -> None:
    for method in ("full", "h2o"):
        held = value(rows, method, "held_bytes")
        assert value(rows, method, "bytes_per_token") == held / SEEN
        assert value(rows, method, "bytes_per_token_layer") == held / SEEN / LAYERS


def test_a_model_spread_over_devices_is_not_loaded_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = bench(methods("full"), random_llama(4, KV_HEADS, HEAD, layers=LAYERS, dtype=torch.float32))
    here = replace(here, spec=ModelSpec("it", random={"model_type": "llama"}))
    here.loaded.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    monkeypatch.setattr(measured, "_apart", None)
    assert value(rows_of(measure_bytes(here, Memory([CONTEXT], TOKENS))), "full", "held_bytes") > 0


def test_full_by_hand(rows: list[Row]) -> None:
    dense = 2 * LAYERS * KV_HEADS * SEEN * HEAD * 4
    assert value(rows, "full", "dense_bytes") == dense
    assert parts(rows, "full") == {"dense": dense, "positions": LAYERS * SEEN * 4}
    assert value(rows, "full", "slack_bytes") == 0
    # The run is in float32; 16 bits are half of its dense bytes.
    assert value(rows, "full", "x_smaller") == pytest.approx(dense / 2 / (dense + LAYERS * SEEN * 4))
    assert value(rows, "full", "bits_per_value") == pytest.approx(32 + 32 * LAYERS * SEEN / (dense / 4))


def test_h2o_by_hand(rows: list[Row]) -> None:
    slots, kept = 10 + 1, 10
    heads = LAYERS * KV_HEADS
    free = heads * 8  # one int64 a head: the slot that the next token takes
    expected = {
        "dense": 2 * heads * slots * HEAD * 4,
        "scores": heads * slots * 4,
        "positions": heads * slots * 4 + free,
    }
    assert parts(rows, "h2o") == expected
    assert value(rows, "h2o", "kept_tokens") == kept
    per_slot = heads * (2 * HEAD * 4 + 4 + 4)
    assert value(rows, "h2o", "slack_bytes") == per_slot * (slots - kept)
    used = per_slot * kept + free
    assert value(rows, "h2o", "x_smaller") == pytest.approx(
        value(rows, "full", "dense_bytes") / 2 / (per_slot * slots + free)
    )
    assert value(rows, "h2o", "bits_per_value") == pytest.approx(8 * used / (2 * heads * HEAD * kept))


def test_kivi_by_hand(rows: list[Row]) -> None:
    bits, group, residual = 4, 8, 16
    heads = LAYERS * KV_HEADS
    key_rows, value_rows = SEEN // residual * residual, SEEN - residual
    codes = (key_rows + value_rows) * HEAD * bits // 8
    pairs = (key_rows + value_rows) * HEAD // group * 2 * 2  # scale and minimum, two bytes each
    ring = 2 * (residual + 1) * HEAD * 4
    expected = {
        "codes": heads * codes,
        "scales": heads * pairs,
        "residual": heads * ring,
        "positions": LAYERS * SEEN * 4,
    }
    assert parts(rows, "kivi") == expected
    # 44 tokens: 32 keys and 28 values are quantised, 12 and 16 stand in 17 rows of residual each.
    assert value(rows, "kivi", "slack_bytes") == heads * HEAD * 4 * (17 - 12 + 17 - 16)
    used = sum(expected.values()) - value(rows, "kivi", "slack_bytes")
    assert value(rows, "kivi", "bits_per_value") == pytest.approx(8 * used / (2 * heads * HEAD * SEEN))


def test_quantised_rows_cost_what_the_formula_says() -> None:
    """Bits a value: b + 32 / G, for everything that has left the residual."""
    found = rows_of(measure_bytes(bench(methods("full", "kivi")), Memory([300], 4)))
    held = parts(found, "kivi")
    quantised = 304 // 16 * 16 + (304 - 16)
    values = LAYERS * KV_HEADS * HEAD * quantised
    assert 8 * (held["codes"] + held["scales"]) / values == 4 + 32 / 8


def test_recompute_holds_nothing(rows: list[Row]) -> None:
    assert value(rows, "recompute", "held_bytes") == 0
    assert parts(rows, "recompute") == {}
    assert value(rows, "recompute", "kept_tokens") == 0
    assert not [row for row in rows if row.method == "recompute" and row.metric in ("x_smaller", "bits_per_value")]
    # The prompt, then the whole prefix at every step.
    assert value(rows, "recompute", "positions_processed") == sum(range(CONTEXT, SEEN + 1))
    assert value(rows, "full", "positions_processed") == SEEN


def test_parts_sum_to_what_is_held(rows: list[Row]) -> None:
    for method in ("full", "h2o", "kivi", "recompute", "streaming_llm"):
        assert sum(parts(rows, method).values()) == value(rows, method, "held_bytes")


def test_engaged_and_context(rows: list[Row]) -> None:
    assert [value(rows, m, "engaged") for m in ("full", "h2o", "kivi", "recompute")] == [0, 1, 1, 0]
    assert {(row.measure, row.context, row.batch, row.status) for row in rows} == {("memory", CONTEXT, 1, "ok")}
    assert {row.context for row in rows_of(measure_bytes(bench(methods("full")), Memory([20, 30], 2)))} == {20, 30}


def test_heads_are_not_repeated() -> None:
    """A cache of 2 KV heads for 4 query heads is half of one with 4: grouped heads are never spread out."""
    wide = random_llama(4, 4, HEAD, layers=LAYERS, dtype=torch.float32)
    spread = rows_of(measure_bytes(bench(methods("full"), wide), Memory([CONTEXT], TOKENS)))
    grouped = rows_of(measure_bytes(bench(methods("full")), Memory([CONTEXT], TOKENS)))
    assert parts(spread, "full")["dense"] == 2 * parts(grouped, "full")["dense"]


# peaks


def allocated(mebibytes: int) -> int:
    """Bytes of a tensor that was there for a moment."""
    block = torch.ones(mebibytes * MIB // 4)
    return block.numel() * 4


def test_a_peak_is_what_was_allocated_and_freed_again() -> None:
    with peak(torch.device("cpu")) as found:
        expected = allocated(96)
    assert found.source == "VmHWM of the process"
    assert found.bytes == pytest.approx(expected, abs=16 * MIB)


def test_where_the_mark_cannot_be_reset_the_resident_size_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> int:
        if str(path) == "/proc/self/clear_refs":
            raise PermissionError(13, "Permission denied")
        return write_text(path, *args, **kwargs)

    samples = Semaphore(0)
    resident_bytes = peaks._resident_bytes

    def counted() -> int:
        found = resident_bytes()
        samples.release()
        return found

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(peaks, "_resident_bytes", counted)
    with peak(torch.device("cpu")) as found:
        block = torch.ones(96 * MIB // 4)
        while samples.acquire(blocking=False):
            pass
        for _ in range(2):  # the first of them may have begun before the block was full
            assert samples.acquire(timeout=60)
        expected = block.numel() * 4
        del block
    assert "sampled" in found.source
    assert found.bytes == pytest.approx(expected, abs=16 * MIB)


def test_a_peak_counts_from_what_was_there_before() -> None:
    before = torch.ones(96 * MIB // 4)
    with peak(torch.device("cpu")) as found:
        expected = allocated(32)
    assert found.bytes == pytest.approx(expected, abs=16 * MIB)
    assert before.sum() > 0
    del before
    gc.collect()
    with peak(torch.device("cpu")) as found:
        pass
    assert found.bytes < 16 * MIB  # nothing of the phase before


def test_memory_that_the_library_kept_does_not_hide_a_peak() -> None:
    """Freed small blocks stay with the C library: a phase that takes them again must still be seen."""
    small = [torch.ones(8_000) for _ in range(2_000)]  # 61 MiB in blocks below the library's own mmap threshold
    guard = torch.ones(8)
    del small
    with peak(torch.device("cpu")) as found:
        again = [torch.ones(8_000) for _ in range(2_000)]
    assert len(again) == 2_000 and guard.sum() == 8
    assert found.bytes > 40 * MIB


def test_peaks_of_prefill_and_decode_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, step = measured.prefill, measured.step
    monkeypatch.setattr(measured, "prefill", lambda *args: (allocated(128), prefill(*args))[1])
    monkeypatch.setattr(measured, "step", lambda *args: (allocated(64), step(*args))[1])
    found = rows_of(measure_bytes(bench(methods("full", "h2o")), Memory([CONTEXT], 2)))
    for method in ("full", "h2o"):
        assert value(found, method, "peak_prefill_bytes") == pytest.approx(128 * MIB, abs=16 * MIB)
        assert value(found, method, "peak_decode_bytes") == pytest.approx(64 * MIB, abs=16 * MIB)
    notes = {row.note for row in found if row.metric and row.metric.startswith("peak")}
    assert notes == {"VmHWM of the process, above what was held before the phase"}


def test_what_a_first_call_allocates_is_not_the_first_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def first_call(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(torch.ones(128 * MIB // 4))
        return prefill(*args, **kwargs)

    prefill = measured.prefill
    monkeypatch.setattr(measured, "prefill", first_call)
    found = rows_of(measure_bytes(bench(methods("full", "h2o")), Memory([CONTEXT], 2)))
    assert len(kept) == 1
    assert max(value(found, method, "peak_prefill_bytes") for method in ("full", "h2o")) < 16 * MIB


@pytest.mark.parametrize("how", ["failed", "oom"])
def test_one_broken_method_leaves_the_others_whole(how: str) -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=CONTEXT + 2), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    found = rows_of(measure_bytes(here, Memory([CONTEXT, 20], TOKENS)))
    done = {(row.method, row.context) for row in found}
    assert done == {("full", CONTEXT), ("h2o", CONTEXT), ("full", 20), ("breaks", 20), ("h2o", 20)}
    ((label, row),) = here.journal.failures
    assert (label, row.measure, row.context, row.status) == ("breaks", "memory", CONTEXT, how)


# side by side


@pytest.mark.parametrize("method", ["full", "h2o", "kivi", "streaming_llm"])
def test_formula_bookkeeping_and_spare_slots_add_up_to_what_is_held(rows: list[Row], method: str) -> None:
    held = parts(rows, method)
    between = value(rows, method, "spare_bytes") + held["positions"] + held.get("scores", 0)
    assert value(rows, method, "analytic_bytes") + between == value(rows, method, "held_bytes")
    assert value(rows, method, "spare_bytes") >= 0


def test_analytic_bytes_by_hand(rows: list[Row]) -> None:
    heads = LAYERS * KV_HEADS
    assert value(rows, "full", "analytic_bytes") == value(rows, "full", "dense_bytes")
    assert value(rows, "h2o", "analytic_bytes") == 2 * heads * 10 * HEAD * 4
    assert value(rows, "h2o", "spare_bytes") == 2 * heads * 1 * HEAD * 4  # the slot that a step writes first
    # kivi, 4 bits in groups of 8, 44 tokens: 32 keys and 28 values in codes, each beside 17 rows of residual.
    bits = 4 + 32 / 8
    assert value(rows, "kivi", "analytic_bytes") == heads * HEAD * ((32 + 28) * bits / 8 + 2 * 17 * 4)


def test_what_the_allocator_set_aside(rows: list[Row]) -> None:
    for method in ("full", "h2o", "kivi", "streaming_llm"):
        held = value(rows, method, "held_bytes")
        # Rounded up to whole blocks; a handful of storages, none of them padded by more than a page.
        assert held <= value(rows, method, "allocator_bytes") <= held + 16 * 4096
    assert not [row for row in rows if row.method == "recompute" and row.metric == "allocator_bytes"]


def test_a_view_keeps_its_whole_storage_alive_and_the_allocator_agrees() -> None:
    whole = torch.zeros(MIB)
    view = Buffer("dense", whole[: MIB // 16], 1.0)
    assert held_bytes([view]).held == 4 * MIB
    assert 4 * MIB <= (allocator_bytes([view]) or 0) <= 4 * MIB + 2 * 4096
    assert allocator_bytes([view, view]) == allocator_bytes([view])


# a process of its own


SPEC = ModelSpec(
    "random",
    device="cpu",
    random={
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
    },
)


def test_a_fresh_process_measures_the_same_and_nothing_that_was_there_before() -> None:
    """Bytes are the same to the byte. A hundred megabytes that this process has used and freed are nobody's peak."""
    here = bench(methods("full", "h2o", "kivi", budget=10))
    here = replace(here, loaded=load_model(SPEC))
    inside = rows_of(measure_bytes(here, Memory([CONTEXT], TOKENS, isolate=False)))
    here = replace(here, spec=SPEC)
    apart = rows_of(measure_bytes(here, Memory([CONTEXT], TOKENS)))
    assert [(row.method, row.metric) for row in apart] == [(row.method, row.metric) for row in inside]
    for a, b in zip(apart, inside, strict=True):
        if a.metric and a.metric.startswith("peak_"):
            assert (a.note or "").endswith("in a fresh process") and "fresh" not in (b.note or "")
        elif a.metric != "allocator_bytes":
            assert a == b
    assert not here.journal.failures


@pytest.mark.parametrize(
    ("how", "status", "note"),
    [
        ("oom", "oom", "OutOfMemoryError: broken at position"),
        ("killed", "oom", "MemoryError: its process was killed"),
        ("gone", "failed", "ended without a result, exit code 7"),
    ],
)
def test_whatever_a_process_of_its_own_dies_of_is_a_row(how: str, status: str, note: str) -> None:
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=CONTEXT + 2), DenseStore())}
    here = bench(broken | methods("h2o"))
    here = replace(here, spec=SPEC)
    found = rows_of(measure_bytes(here, Memory([CONTEXT], TOKENS)))
    assert {row.method for row in found} == {"h2o"}
    ((label, row),) = here.journal.failures
    assert (label, row.measure, row.context, row.status) == ("breaks", "memory", CONTEXT, status)
    assert note in (row.note or "")


def test_layers_that_the_model_bounds_count_with_what_they_hold() -> None:
    """Gemma 3's kind: one layer of two with a window of 16, which holds 15 tokens whatever the method; the full cache's
    formula counts it so, and not as if it grew."""
    rows = rows_of(measure_bytes(bench(methods("full", "h2o", budget=10), tiny("gemma3")), Memory([CONTEXT], TOKENS)))
    numbers = 2 * 2 * 16  # keys and values, KV heads, head
    dense = 4 * numbers * (SEEN + 15)
    for method in ("full", "h2o"):
        assert value(rows, method, "dense_bytes") == dense
        assert value(rows, method, "compressible_share") == pytest.approx(SEEN / (SEEN + 15))
    assert value(rows, "full", "x_smaller") == pytest.approx(0.5, abs=0.07)
    assert value(rows, "full", "bits_per_value") == pytest.approx(32, rel=0.07)
    held = {method: parts(rows, method)["dense"] for method in ("full", "h2o")}
    assert held == {"full": 4 * numbers * (SEEN + 16), "h2o": 4 * numbers * (11 + 16)}  # a slot for the step itself


def test_progress_names_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method is a phase of its own in a run, so a line without a name would say nothing."""
    said: list[str] = []
    here = bench(methods("full", "h2o"))
    monkeypatch.setattr(type(here.progress), "say", lambda progress, line: said.append(line))
    for method in here.methods:
        rows_of(measure_bytes(replace(here, methods=[method]), Memory([CONTEXT], TOKENS, isolate=False)))
    rows_of(measure_bytes(here, Memory([CONTEXT], TOKENS, isolate=False)))
    assert [line.rpartition(":")[0] for line in said] == [
        f"memory {CONTEXT} full",
        f"memory {CONTEXT} h2o",
        f"memory {CONTEXT} of 2 methods",
    ]


def test_the_peak_of_a_chunked_prefill_does_not_grow_with_the_prompt() -> None:
    """Bytes above the start of the phase, by the process's own counter; a prefill in one piece grows as the prompt."""
    model = random_llama(4, KV_HEADS, HEAD, layers=LAYERS, dtype=torch.float32)
    text = torch.randint(97, (8000,), generator=torch.Generator().manual_seed(1))
    named = methods("full", "h2o", budget=64)
    named["chunked"] = replace(named["h2o"], prefill_chunk=256)
    found: dict[tuple[str, int], float] = {}
    for context in (1024, 4096):
        rows = rows_of(measure_bytes(run_context_of(model, named, text), Memory([context], 1, isolate=False)))
        found |= {(name, context): value(rows, name, "peak_prefill_bytes") for name in ("h2o", "chunked")}
        assert value(rows, "chunked", "held_bytes") == value(rows, "h2o", "held_bytes")
    assert found["h2o", 4096] > 1.5 * found["h2o", 1024]
    growth = {name: found[name, 4096] - found[name, 1024] for name in ("h2o", "chunked")}
    assert growth["chunked"] < growth["h2o"] / 5, growth  # what is left is the allocator's
    assert found["chunked", 4096] < found["h2o", 4096] / 2
