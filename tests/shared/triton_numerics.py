"""The Triton kernels against the reference, under Triton's interpreter.

Not collected by name: whether kernels are interpreted is decided when they are imported, so `test_kernels_triton.py`
runs this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from kvbench.cache.build import Method, build_cache
from kvbench.cache.calibrate import bases_of
from kvbench.cache.captured import DecodeStep
from kvbench.cache.decode import step
from kvbench.cache.rotary import key_rotations
from kvbench.cache.store import DenseStore
from kvbench.kernels import reference, triton_kernels, triton_plan
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Dense, Part
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_decode import TritonKernel, refusal
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.lowrank import LowRank
from kvbench.methods.per_token import PerToken
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.turbo import Turbo
from tests.shared.models import random_llama
from tests.shared.triton_cases import (
    check,
    coded,
    dense,
    error,
    kivi,
    kivi_slots,
    packed,
    per_token,
    randn,
    store,
    whole_coded,
    whole_kivi,
)
from tests.shared.triton_ptx import PtxInNumpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
BITS = pytest.mark.parametrize("bits", [8, 4, 2])


def draw(
    dtype: torch.dtype,
    slots: int,
    heads: tuple[int, int] = (2, 1),
    q: int = 1,
    dims: tuple[int, int] = (64, 64),
    batch: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [B, Hq, q, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]."""
    return (
        randn(batch, heads[0], q, dims[0], dtype=dtype, seed=1),
        randn(batch, heads[1], slots, dims[0], dtype=dtype, seed=2),
        randn(batch, heads[1], slots, dims[1], dtype=dtype, seed=3),
    )


def test_kernels_are_interpreted() -> None:
    assert triton_kernels.INTERPRETED


@DTYPES
@BITS
@pytest.mark.parametrize("kind", ["kivi", "per token"])
def test_every_width_and_axis(kind: str, bits: int, dtype: torch.dtype) -> None:
    query, key, value = draw(dtype, 171)
    check(query, store(kind, key, value, bits))


@DTYPES
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind, bits", [("per token", 3), ("codebook", 4), ("codebook", 3)])
def test_3_bit_codes_and_codebooks(kind: str, bits: int, dim: int, dtype: torch.dtype) -> None:
    query, key, value = draw(dtype, 130, (4, 2), dims=(dim, dim))
    check(query, store(kind, key, value, bits))


@DTYPES
def test_codes_of_different_kinds(dtype: torch.dtype) -> None:
    query, key, value = draw(dtype, 70, (3, 1), q=2, dims=(128, 64))
    check(query, per_token(key, value, (3, 8), 64))
    check(query, (packed(key, "channel", 3, 128), packed(value, "channel", 3, 32)))
    check(query, (coded(key, value, (3, 4))[0], [Dense(value)]))
    check(query, (per_token(key, value)[0], coded(key, value, (4, 3))[1]))
    query, key, value = draw(dtype, 70, dims=(96, 96))
    check(query, coded(key, value, (4, 3)))


@DTYPES
def test_3_bit_codes_and_dense_rows(dtype: torch.dtype) -> None:
    query, key, value = draw(dtype, 100, (4, 2))
    check(query, ([*packed(key[:, :, :70], "channel", 3, 32), Dense(key[:, :, 70:])], [Dense(value)]))
    check(query, ([Dense(key)], [*coded(key, value[:, :, :70], (4, 4))[1], Dense(value[:, :, 70:])]))


@DTYPES
@pytest.mark.parametrize("kind", ["dense", "only keys packed", "only values packed"])
def test_dense_pieces(kind: str, dtype: torch.dtype) -> None:
    query, key, value = draw(dtype, 130)
    check(query, store(kind, key, value))


@DTYPES
def test_8_bit_floats(dtype: torch.dtype) -> None:
    """Subnormal numbers, zeros and the largest among them."""
    query, key, value = draw(dtype, 130)
    key[:, :, 7], value[:, :, 8], value[:, :, 9, :5] = 2.0**-8, 448.0, 0.0
    narrow = [rows.to(torch.float8_e4m3fn) for rows in (key, value)]
    check(query, ([Dense(narrow[0])], [Dense(narrow[1])]))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 96, 128, 129])
def test_lengths_around_blocks_and_residuals(length: int) -> None:
    """KIVI with a residual of 32: nothing packed, only keys, both; rings that wrap and rings that do not."""
    query, key, value = draw(torch.float16, max(length, 4))
    check(query, kivi(key, value, residual=32))
    query, key, value = draw(torch.float32, length)
    check(query, per_token(key, value))


@pytest.mark.parametrize("heads", [(6, 2), (1, 1), (20, 1)], ids=["two kv heads", "one query head", "two row blocks"])
def test_head_groups_and_batches(heads: tuple[int, int]) -> None:
    query, key, value = draw(torch.float16, 70, heads, batch=2)
    check(query, kivi(key, value, residual=32))


@pytest.mark.parametrize("dims, group", [((80, 80), 16), ((96, 96), 32), ((128, 64), 64), ((256, 256), 128)])
def test_head_sizes(dims: tuple[int, int], group: int) -> None:
    query, key, value = draw(torch.float16, 140, dims=dims)
    check(query, kivi(key, value, (4, 4), min(group, dims[1]), 128))
    check(query, dense(key[:, :, :40], value[:, :, :40]))


def test_codes_of_different_widths() -> None:
    query, key, value = draw(torch.float16, 100)
    check(query, kivi(key, value, (2, 8), residual=32))
    check(query, per_token(key, value, (8, 2), 16))


def test_several_tokens_and_holes_in_each_head() -> None:
    query, key, value = draw(torch.float16, 90, (6, 2), q=3, batch=2)
    visible = torch.rand(2, 2, 3, 90, generator=torch.Generator().manual_seed(1)) < 0.4
    visible[..., 5] = True
    check(query, per_token(key, value), options=AttendOptions(visible))
    causal = torch.arange(90) <= torch.arange(87, 90).view(1, 1, 3, 1)
    check(query, kivi(key, value, residual=32), options=AttendOptions(causal))


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "per token", "kivi"])
def test_programs_that_walk_many_tiles(kind: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plan, "_fewest_tiles", lambda tiles, *_: min(tiles, programs))
    query, key, value = draw(torch.float16, 350)
    check(query, store(kind, key, value))


def test_more_programs_and_slots_than_are_combined_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plan, "SHARES", 2)
    monkeypatch.setattr(triton_plan, "COLUMNS", 64)
    query, key, value = draw(torch.float16, 300, dims=(64, 40))
    check(query, dense(key, value), Scoring(0.1, sink_logits=torch.tensor([1.0, -1.0])))


def test_unseen_slots_get_exactly_nothing() -> None:
    query, key, value = draw(torch.float32, 140)
    visible = torch.zeros(1, 1, 1, 140, dtype=torch.bool)
    visible[..., 3] = True  # whole tiles, and whole programs, see nothing
    output, probabilities = TritonKernel().attend(query, *dense(key, value), Scoring(0.1), AttendOptions(visible))
    assert probabilities is not None and torch.equal(probabilities.view(2, 140), visible[0, 0].repeat(2, 1).float())
    torch.testing.assert_close(output[0, :, 0], value[0, 0, 3].expand(2, -1))


@pytest.mark.parametrize("softcap, sinks", [(1.3, False), (None, True), (30.0, True)])
def test_softcap_and_learned_sinks(softcap: float | None, sinks: bool) -> None:
    query, key, value = draw(torch.float32, 70, (4, 2))
    logits = torch.linspace(-1, 3, 4) if sinks else None
    check(query, dense(key, value), Scoring(0.8, softcap, None, logits))
    check(query.half(), per_token(key.half(), value.half()), Scoring(0.8, softcap, None, logits))


@pytest.mark.parametrize("kind, n_sink", [("dense", 4), ("per token", 1), ("per token", 70), ("kivi", 4)])
def test_another_query_for_the_sinks(kind: str, n_sink: int) -> None:
    query, key, value = draw(torch.float16, 150, (4, 2), q=2)
    check(query, store(kind, key, value), options=AttendOptions(sink_query=query.flip(-1), n_sink=n_sink))


def test_probabilities_only_on_request() -> None:
    query, key, value = draw(torch.float16, 70)
    parts = kivi(key, value, residual=32)
    with_them = TritonKernel().attend(query, *parts, Scoring(0.1))[0]
    without, nothing = TritonKernel().attend(query, *parts, Scoring(0.1), AttendOptions(want_probabilities=False))
    assert nothing is None and torch.equal(with_them, without)


def test_views_of_other_layouts() -> None:
    """A cache laid out [B, S, H, D], a query likewise, and more capacity than length; nothing is copied."""
    query, key, value = draw(torch.float16, 90, (4, 2), q=2, batch=2)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key, value = (rows.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :77] for rows in (key, value))
    check(query, dense(key, value))


@pytest.mark.parametrize("length", [4, 30, 33, 64, 100, 130, 191])
def test_lengths_by_pointer(length: int) -> None:
    """Whole buffers with a device-side length give what the filled parts give; the rest of the buffers is NaN."""
    query, key, value = draw(torch.float16, length, (4, 2))
    slots = kivi_slots(key, value, (4, 4), 32, 32, capacity=200)
    parts, lengths = whole_kivi(slots)
    got = TritonKernel().attend(query, *parts, Scoring(0.1), AttendOptions(lengths=lengths))
    want = reference.attend(query.float(), slots.key_parts(), slots.value_parts(), Scoring(0.1))
    assert error(got[0], want[0]) < 2e-3
    assert got[1] is not None and error(got[1][..., :length], want[1]) < 1e-3
    assert got[1][..., length:].eq(0).all()


@pytest.mark.parametrize("kind, bits", [("per token", 3), ("codebook", 4), ("codebook", 3)])
def test_lengths_of_3_bit_codes_and_codebooks_by_pointer(kind: str, bits: int) -> None:
    query, key, value = draw(torch.float16, 77, (4, 2))
    parts, lengths = whole_coded(key, value, bits, 140)
    if kind == "per token":
        longer = [torch.cat([rows, torch.full_like(rows, 60000.0)], 2) for rows in (key, value)]
        parts = per_token(longer[0], longer[1], (bits, bits))
    got = TritonKernel().attend(query, *parts, Scoring(0.1), AttendOptions(lengths=lengths))
    want = reference.attend(query.float(), *store(kind, key, value, bits), Scoring(0.1))
    assert error(got[0], want[0]) < 2e-3
    assert got[1] is not None and error(got[1][..., :77], want[1]) < 1e-3
    assert got[1][..., 77:].eq(0).all()


def test_a_length_for_each_head() -> None:
    query, key, value = draw(torch.float32, 150, (4, 2), batch=2)
    lengths = torch.tensor([[1, 150], [64, 77]], dtype=torch.int32)
    visible = torch.arange(150) < lengths[:, :, None, None]
    key, value = (rows.masked_fill(~visible.mT, torch.nan) for rows in (key, value))
    by_pointer = torch.stack([torch.zeros_like(lengths), torch.zeros_like(lengths), lengths], -1)
    got = TritonKernel().attend(query, *dense(key, value), Scoring(0.1), AttendOptions(lengths=by_pointer))
    finite = dense(key.nan_to_num(), value.nan_to_num())
    want = reference.attend(query, *finite, Scoring(0.1), AttendOptions(visible))
    assert error(got[0], want[0]) < 1e-5
    assert got[1] is not None and error(got[1], want[1]) < 1e-5


def test_what_the_kernels_do_not_take_goes_to_the_reference() -> None:
    query, key, value = draw(torch.float32, 64)
    three: list[Part] = [Dense(key[:, :, a:b]) for a, b in ((0, 1), (1, 20), (20, 64))]
    cases: list[tuple[torch.Tensor, list[Part], list[Part], str]] = [
        (query.double(), [Dense(key.double())], [Dense(value.double())], "float64"),
        (query, three, [Dense(value)], "ring"),
        (query, [Dense(key)], packed(value, "token", 4, 32), "along tokens"),
        (query, packed(key, "channel", 2, 8), [Dense(value)], "groups of 8 codes of 2 bits"),
        (query, packed(key, "token", 3, 32), [Dense(value)], "groups of 32 codes of 3 bits"),
        (query, coded(key, value)[0], coded(key[..., :16], value[..., :16], (3, 3))[1], "groups of 16 codes of 3 bits"),
        (query, [Dense(key.mT.contiguous().mT)], [Dense(value)], "not adjacent"),
    ]
    for q, keys, values, reason in cases:
        assert reason in str(refusal(q, keys, values))
        got = TritonKernel().attend(q, keys, values, Scoring(0.1))
        assert torch.equal(got[0], reference.attend(q, keys, values, Scoring(0.1))[0])
        with pytest.raises(ValueError, match="do not take"):
            TritonKernel().attend(
                q, keys, values, Scoring(0.1), AttendOptions(lengths=torch.zeros(3, dtype=torch.int32))
            )


MODEL = random_llama(4, 2, 32, layers=1, dtype=torch.float32)
ROTATIONS = key_rotations(MODEL, 1)
BASES = bases_of(MODEL, torch.randint(97, (2, 64)), ROTATIONS)

CAPTURED = {
    "kivi4": Method("m", Full(), Kivi(4, 4, 32, 32)),
    "kivi4, keys per token": Method("m", Full(), Kivi(4, 4, 32, 32, k_axis="token")),
    "h2o+int4": Method("m", H2O(36), PerToken(4, 4)),
    "streaming_llm": Method("m", StreamingLLM(36), DenseStore()),
    "turbo": Method("m", Full(), Turbo(4, 3)),
    "h2o+lowrank int4": Method("m", H2O(36), LowRank(k_bits=4, v_bits=4).calibrated(BASES, ROTATIONS)),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_the_captured_step(name: str) -> None:
    """A decode step as a CUDA graph runs it, lengths on the device, past a flush or evictions."""
    tokens = torch.randint(97, (1, 67))
    eager, captured = (build_cache(MODEL, CAPTURED[name], tokens[:, :61], 6, kernel="reference") for _ in range(2))
    for layer in captured.layers:
        layer.kernel = TritonKernel()
    decode = DecodeStep(MODEL, captured)
    for at in range(61, 67):
        want = step(MODEL, tokens[:, at : at + 1], eager)
        with torch.inference_mode():
            decode.ids.copy_(tokens[:, at : at + 1])
            got = decode.run()
            for counts in decode.count():
                decode.flush(counts)
        assert error(got, want) < 1e-4
    kept, wanted = (cache.layers[0].kept_positions() for cache in (captured, eager))
    assert captured.has_compressed and torch.equal(kept, wanted)


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> PtxInNumpy:
    """What the GPU runs instead of plain operations, executed instruction by instruction."""
    machine = PtxInNumpy()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", lambda _, *arguments: machine(*arguments))
    monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
    return machine


@BITS
@pytest.mark.parametrize("kind", ["kivi", "per token"])
def test_the_ptx_says_the_same(kind: str, bits: int, ptx: PtxInNumpy) -> None:
    query, key, value = draw(torch.float16, 100, dims=(128, 128))
    check(query, store(kind, key, value, bits))
    assert ptx.ran == {"lop3.b32", "fma.rn.f16x2", "prmt.b32"}


@pytest.mark.parametrize("kind, bits", [("per token", 3), ("codebook", 4), ("codebook", 3)])
def test_the_ptx_of_3_bit_codes_and_codebooks(kind: str, bits: int, ptx: PtxInNumpy) -> None:
    query, key, value = draw(torch.float16, 100, dims=(128, 128))
    check(query, store(kind, key, value, bits))
    assert ("mul.rn.f16x2" in ptx.ran) == (kind == "codebook")


@st.composite
def calls(data: st.DrawFn) -> dict[str, object]:
    group = data(st.sampled_from([8, 16, 32, 64]))
    bits = data(st.sampled_from([(b, c) for b in (8, 4, 2) for c in (8, 4, 2) if group * min(b, c) >= 32]))
    kv_heads = data(st.integers(1, 2))
    return {
        "kind": data(st.sampled_from(["kivi", "per token", "dense"])),
        "group": group,
        "bits": bits,
        "heads": (kv_heads * data(st.integers(1, 5)), kv_heads),
        "q": data(st.integers(1, 3)),
        "slots": data(st.integers(4, 150)),
        "dims": (group * data(st.integers(1, 128 // group)),) * 2,
        "dtype": data(st.sampled_from([torch.float16, torch.float32])),
        "masked": data(st.booleans()),
        "softcap": data(st.sampled_from([None, 5.0])),
        "seed": data(st.integers(0, 99)),
    }


def check_call(call: dict) -> None:
    query, key, value = draw(call["dtype"], call["slots"], call["heads"], call["q"], call["dims"])
    if call["kind"] == "kivi":
        parts = kivi(key, value, call["bits"], call["group"], 64)
    else:
        parts = dense(key, value) if call["kind"] == "dense" else per_token(key, value, call["bits"], call["group"])
    visible = None
    if call["masked"]:
        generator = torch.Generator().manual_seed(call["seed"])
        visible = torch.rand(1, call["heads"][1], call["q"], call["slots"], generator=generator) < 0.7
        visible[..., 0] = True
    assert refusal(query, *parts) is None
    scoring = replace(Scoring(query.shape[3] ** -0.5), softcap=call["softcap"])
    check(query, parts, scoring, AttendOptions(visible))


@given(calls())
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_calls(call: dict) -> None:
    check_call(call)


@pytest.mark.slow
@given(calls())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_random_calls(call: dict) -> None:
    check_call(call)
