"""The decode step that a CUDA graph captures, against the eager one, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import Method, build_cache
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache, Layer
from kvbench.cache.calibrate import bases_of
from kvbench.cache.captured import DecodeStep
from kvbench.cache.counters import BlockCounters, CacheFull
from kvbench.cache.decode import step
from kvbench.cache.graph import WARM_UP, CudaGraph, EagerDecoder, GraphDecoder, decoder_for
from kvbench.cache.layer import SlotLayer
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rotary import key_rotations
from kvbench.cache.stock import StockStore
from kvbench.cache.store import CannotCapture, DenseStore, Slots
from kvbench.errors import UserError
from kvbench.kernels.parts import Coded, Dense
from kvbench.methods.cam import CaM
from kvbench.methods.d2o import D2O
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.fp8 import Fp8
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.lagkv import LagKV
from kvbench.methods.lowrank import LowRank
from kvbench.methods.per_token import PerToken
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.r_kv import RKV
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from kvbench.methods.turbo import Turbo
from tests.shared.families import exact_llama, random_ids, tiny
from tests.shared.tape import OneDevice, TapedGraph, TapeRecorder, on_meta

R = 8
STEPS = 3 * R + 1
MODEL = exact_llama(4, 2, 32)
SMALL = exact_llama(2, 1, layers=1)
KIVI = Kivi(4, 4, 8, R)


def lowrank(rank: float, bits: int | None = None, model: PreTrainedModel = MODEL) -> LowRank:
    """Calibrated on random tokens."""
    rotations = key_rotations(model, 2)
    bases = bases_of(model, random_ids(4, 64, seed=9), rotations)
    return LowRank(rank=rank, k_bits=bits, v_bits=bits).calibrated(bases, rotations)


METHODS = {
    "full": Method("m", Full(), DenseStore()),
    "bf16": Method("m", Full(), DenseStore("bfloat16")),
    "kivi4": Method("m", Full(), KIVI),
    "kivi K2 V8": Method("m", Full(), Kivi(2, 8, 8, R)),
    "kivi, keys per token": Method("m", Full(), Kivi(4, 4, 8, R, k_axis="token")),
    "kivi, values per channel": Method("m", Full(), Kivi(4, 4, 8, R, v_axis="channel")),
    "snapkv, kivi the other way": Method("m", SnapKV(budget=40), Kivi(4, 2, 8, R, "token", "channel")),
    "int8": Method("m", Full(), PerToken(8, 8)),
    "h2o": Method("m", H2O(budget=40), DenseStore()),
    "h2o filling": Method("m", H2O(budget=80), DenseStore()),
    "h2o never full": Method("m", H2O(budget=400), DenseStore()),
    "h2o+int4": Method("m", H2O(budget=40, recent=7, combine="max"), PerToken(4, 4)),
    "h2o+turbo3": Method("m", H2O(budget=40), Turbo(3, 3)),
    "random+fp8": Method("m", Random(budget=40), Fp8()),
    "streaming": Method("m", StreamingLLM(budget=40), DenseStore()),
    "streaming filling+rot3": Method("m", StreamingLLM(budget=80), PerToken(3, 3, rotate=True)),
    "streaming absolute": Method("m", StreamingLLM(budget=40, variant="absolute"), DenseStore()),
    "random": Method("m", Random(budget=40, seed=3), DenseStore()),
    "cam": Method("m", CaM(budget=40, recipients=8), DenseStore()),
    "cam filling+int8": Method("m", CaM(budget=80, merge_by="mean"), PerToken(8, 8)),
    "d2o": Method("m", D2O(budget=40), DenseStore()),
    "d2o filling+rot4": Method("m", D2O(budget=80), PerToken(4, 4, rotate=True)),
    "tova": Method("m", Tova(budget=40), PerToken(8, 8)),
    "knorm": Method("m", KNorm(budget=40), DenseStore()),
    "snapkv": Method("m", SnapKV(budget=40), KIVI),
    "snapkv holding": Method("m", SnapKV(budget=40, decode="evict"), DenseStore()),
    "pyramid": Method("m", Pyramid(budget=40), KIVI),
    "keydiff": Method("m", KeyDiff(budget=40), DenseStore()),
    "lagkv": Method("m", LagKV(budget=40, block=16), DenseStore()),
    "keydiff holding": Method("m", KeyDiff(budget=40, decode="evict"), PerToken(4, 4, rotate=True)),
    "keydiff in blocks": Method("m", KeyDiff(budget=40, buffer=7, decode="evict"), DenseStore()),
    "r_kv": Method("m", RKV(budget=40, buffer=9), DenseStore()),
    "r_kv filling": Method("m", RKV(budget=72, buffer=5, mix_lambda=0.5), PerToken(8, 8)),
    "r_kv+fp8": Method("m", RKV(budget=40, buffer=4), Fp8()),
    "expected_attention in blocks": Method(
        "m", ExpectedAttention(budget=40, buffer=6, future=16, decode="evict"), DenseStore()
    ),
    "lowrank": Method("m", Full(), lowrank(0.5)),
    "lowrank int4": Method("m", Full(), lowrank(0.5, 4)),
    "h2o+lowrank int8": Method("m", H2O(budget=40), lowrank(0.75, 8)),
    "streaming+lowrank": Method("m", StreamingLLM(budget=40), lowrank(0.5)),
}


def replaying(model: PreTrainedModel, cache: KVCache) -> GraphDecoder:
    """The driver that CUDA has, on tapes; the very first step is recorded already."""
    decoder = GraphDecoder(model, cache, DecodeStep(model, cache), TapeRecorder)
    decoder.step.plain = 0  # type: ignore[attr-defined]
    return decoder


def pair(model: PreTrainedModel, method: Method, prompt: Tensor, steps: int, q: int = 1) -> tuple[KVCache, KVCache]:
    """Two equal caches on the reference kernel."""
    made = [build_cache(model, method, prompt, max_new_tokens=steps, max_step=q, kernel="reference") for _ in "ab"]
    assert all(isinstance(cache, KVCache) for cache in made)
    return made[0], made[1]  # type: ignore[return-value]


def held(layer: Layer) -> Iterator[Tensor]:
    """What stands in a layer's filled slots, bit by bit; in blocks of a pool also what stands in the others."""
    slots = getattr(layer, "pool", None) or layer.slots  # type: ignore[union-attr]
    slots = getattr(getattr(slots, "pool", slots), "slots", slots)
    inner = getattr(slots, "codes", slots)  # what is kept of keys that every step makes anew
    rotated = getattr(slots, "rotated", None)  # those of latents lie apart
    for part in (*inner.key_parts(), *inner.value_parts(), *(() if rotated is None else rotated.key_parts())):
        if isinstance(part, Dense):
            yield part.rows.to(torch.float32) if part.rows.dtype.itemsize == 1 else part.rows
        else:
            yield from (part.codes, *((part.norm,) if isinstance(part, Coded) else (part.scale, part.minimum)))
    if layer.rule.budget is not None:
        yield layer.positions()
    if isinstance(layer, RaggedLayer):
        yield from (layer.lengths, *(() if layer.scores is None else (layer.scores,)))
    elif layer.scores is not None and layer.evicts_to is not None and layer.capacity > layer.evicts_to:
        yield layer.scores[..., : layer.slots.length]


def check_equal(eager: KVCache, captured: KVCache, atol: float = 1e-9) -> None:
    """The same tokens in the same slots, the same bits, the same counters and states."""
    assert eager.positions_processed == captured.positions_processed
    pairs = [
        pair
        for a, b in zip(eager.states, captured.states, strict=True)
        for pair in zip(a.tensors(), b.tensors(), strict=True)
    ]
    for a, b in zip(eager.attention_layers, captured.attention_layers, strict=True):
        assert a.counters == b.counters and (a.kept, a.seen, a.evicted) == (b.kept, b.seen, b.evicted)
        if isinstance(a, SlotLayer) and isinstance(b, SlotLayer):
            assert a.slots.length == b.slots.length
        assert torch.equal(a.kept_positions(), b.kept_positions())
        pairs += zip(held(a), held(b), strict=True)
    for x, y in pairs:
        if x.is_floating_point():  # codes and pairs are equal to the bit
            assert torch.equal(x, y) if x.dtype == torch.float16 else torch.allclose(x, y, atol=atol, rtol=1e-6)
        else:
            assert torch.equal(x, y)


def check_replays(model: PreTrainedModel, method: Method, atol: float = 1e-9) -> None:
    """3R + 1 steps, of which all but the first replay what the first queued, and then 5 tokens more, eagerly."""
    prompt, tokens = random_ids(2, 69, seed=1), random_ids(2, STEPS + 5, seed=2)
    eager, captured = pair(model, method, prompt, STEPS + 5, q=5)
    decoder = replaying(model, captured)
    for i in range(STEPS):
        token = tokens[:, i : i + 1]
        torch.testing.assert_close(decoder.feed(token), step(model, token, eager), atol=atol, rtol=0)
    check_equal(eager, captured, atol)
    rest = tokens[:, STEPS:]
    torch.testing.assert_close(step(model, rest, captured), step(model, rest, eager), atol=atol, rtol=0)
    check_equal(eager, captured, atol)


def check_no_step_waits(model: PreTrainedModel, method: Method) -> None:
    """On a device without numbers: whatever reads one raises, and whatever comes from the host is noted."""
    decode = on_meta(DecodeStep(model, pair(model, method, random_ids(1, 40), 9)[1]))
    due = [
        counts
        for counts in decode.groups
        if not isinstance(counts, BlockCounters) or any(counts in decode.count() for _ in range(9))
    ]

    def everything() -> Tensor:
        logits = decode.run()
        for counts in due:
            decode.flush(counts)
        return logits

    everything()  # the first time a rotation's matrix may be made
    with OneDevice() as device:
        assert everything().device.type == "meta"
    assert device.strays == []


@pytest.mark.parametrize("name", METHODS)
def test_a_replay_is_the_eager_step(name: str) -> None:
    check_replays(MODEL, METHODS[name])


@pytest.mark.parametrize(
    "name", ["h2o", "h2o filling", "streaming", "kivi4", "random", "cam", "d2o filling+rot4", "r_kv", "r_kv filling"]
)
def test_capture_after_steps_of_several_tokens(name: str) -> None:
    check_capture_after_a_question(MODEL, METHODS[name])


def check_capture_after_a_question(model: PreTrainedModel, method: Method) -> None:
    """Steps of up to 5 tokens leave several free slots behind; what follows is captured."""
    prompt, tokens = random_ids(1, 60, seed=1), random_ids(1, 38, seed=2)
    caches = pair(model, method, prompt, 38, q=5)
    for cache in caches:
        for at in (0, 5, 8):
            step(model, tokens[:, at : at + (3 if at == 5 else 5)], cache)
    eager, captured = caches
    decoder = replaying(model, captured)
    for i in range(13, 38):
        token = tokens[:, i : i + 1]
        torch.testing.assert_close(decoder.feed(token), step(model, token, eager), atol=1e-9, rtol=0)
    check_equal(eager, captured)


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", ["llama-yarn", "mistral-window", "qwen3", "phi3", "gemma2", "gemma3", "gpt-neox", "gpt2"]
)
def test_families(name: str) -> None:
    """Windows, softcaps and positions of every kind; windows wrap within the steps."""
    model, prompt, tokens = tiny(name), random_ids(2, 24), random_ids(2, 30, seed=1)
    eager, captured = pair(model, Method("m", H2O(budget=30), DenseStore()), prompt, 30)
    decoder = replaying(model, captured)
    for i in range(30):
        token = tokens[:, i : i + 1]
        torch.testing.assert_close(decoder.feed(token), step(model, token, eager), atol=1e-4, rtol=0)
    assert all(
        torch.equal(a.kept_positions(), b.kept_positions()) for a, b in zip(eager.layers, captured.layers, strict=True)
    )


@pytest.mark.parametrize("name", METHODS)
def test_no_step_waits_for_the_host(name: str) -> None:
    check_no_step_waits(MODEL, METHODS[name])


@pytest.mark.engine
def test_rebuilt_keys_take_the_models_own_angles() -> None:
    model = tiny("llama-yarn")
    method = Method("m", H2O(budget=40), lowrank(0.5, model=model))
    check_replays(model, method, atol=1e-4)
    check_no_step_waits(model, method)


def test_layers_that_count_alike_share_their_counters() -> None:
    for name, groups in (("full", 1), ("h2o", 1), ("kivi4", 1), ("pyramid", 2)):
        assert len(DecodeStep(MODEL, pair(MODEL, METHODS[name], random_ids(1, 60), 9)[1]).groups) == groups


def test_nothing_is_allocated_for_the_captured_form() -> None:
    """It takes over the eager cache's buffers: only counters are new."""
    captured = pair(MODEL, METHODS["h2o+int4"], random_ids(1, 60), 9)[1]
    before = {buffer.tensor.untyped_storage().data_ptr() for buffer in captured.buffers()}
    decode = DecodeStep(MODEL, captured)
    with kvbench_attention(MODEL):
        decode.run()
    assert {buffer.tensor.untyped_storage().data_ptr() for buffer in captured.buffers()} == before
    assert sum(tensor.nbytes for counts in decode.groups for tensor in counts.tensors()) < 64


def test_bytes_and_addresses_stay_the_same_for_hundreds_of_replays() -> None:
    for name in ("h2o", "streaming"):
        captured = pair(SMALL, METHODS[name], random_ids(1, 60), 8)[1]
        decoder = replaying(SMALL, captured)
        before = [(held_bytes([buffer]).held, buffer.tensor.data_ptr()) for buffer in captured.buffers()]
        for _ in range(150):
            decoder.feed(random_ids(1, 1))
        assert [(held_bytes([buffer]).held, buffer.tensor.data_ptr()) for buffer in captured.buffers()] == before
        assert captured.kept_tokens == 40 and captured.get_seq_length() == 210


def test_what_has_no_captured_form_is_named() -> None:
    captured = pair(MODEL, METHODS["full"], random_ids(1, 20), 9)[1]

    class Odd(Slots):
        pass

    captured.layers[0].slots = Odd()
    with pytest.raises(CannotCapture, match="Odd"):
        DecodeStep(MODEL, captured)
    fast = build_cache(tiny("llama"), METHODS["full"], random_ids(1, 20), kernel="cpu")
    assert isinstance(fast, KVCache)
    with pytest.raises(CannotCapture, match="told on the host"):
        DecodeStep(MODEL, fast)


class Fails(TapeRecorder):
    """Breaks in the middle of the step after `plain` steps, as a capture that meets a copy to the host."""

    def __call__(self) -> Tensor | None:
        if self.plain > 0:
            return super().__call__()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.parametrize("name", ["full", "kivi4", "h2o", "streaming"])
def test_what_cannot_be_captured_goes_on_eagerly(name: str) -> None:
    prompt, tokens = random_ids(1, 60, seed=1), random_ids(1, 20, seed=2)
    eager, captured = pair(MODEL, METHODS[name], prompt, 20)
    decoder = GraphDecoder(MODEL, captured, DecodeStep(MODEL, captured), Fails)
    for i in range(20):
        assert decoder.is_graph == (i <= WARM_UP)
        token = tokens[:, i : i + 1]
        torch.testing.assert_close(decoder.feed(token), step(MODEL, token, eager), atol=1e-9, rtol=0)
    check_equal(eager, captured)
    assert decoder.note == "eager: LlamaForCausalLM was not captured: operation not permitted when stream is capturing"


@pytest.mark.parametrize("name", ["h2o", "streaming", "kivi4", "full", "cam", "d2o"])
def test_a_first_step_that_breaks_off_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_break_leaves_no_trace(MODEL, METHODS[name], monkeypatch)


def check_break_leaves_no_trace(
    model: PreTrainedModel, method: Method, monkeypatch: pytest.MonkeyPatch, atol: float = 1e-9
) -> None:
    """The model fails behind its first layer, once: what that layer had added to its scores is taken back."""
    prompt, tokens = random_ids(1, 60, seed=1), random_ids(1, 9, seed=2)
    eager, captured = pair(model, method, prompt, 9)
    decoder = GraphDecoder(model, captured, DecodeStep(model, captured), TapeRecorder)

    def breaks(*args: object, **kwargs: object) -> None:
        raise TypeError("no position_ids here")

    for i in range(9):
        with monkeypatch.context() as patch:
            if i == 0:
                patch.setattr(decoder.decode.layers[1], "attend", breaks)
            got = decoder.feed(tokens[:, i : i + 1])
        torch.testing.assert_close(got, step(model, tokens[:, i : i + 1], eager), atol=atol, rtol=0)
    check_equal(eager, captured, atol)
    assert decoder.note is not None and "no position_ids here" in decoder.note


def test_a_full_or_foreign_batch_is_refused_before_anything_changes() -> None:
    captured = pair(MODEL, METHODS["full"], random_ids(1, 20), 2)[1]
    decoder = replaying(MODEL, captured)
    for ids, reason in ((random_ids(2, 1), "2 rows"), (random_ids(1, 2), "2 tokens a row")):
        with pytest.raises(UserError, match=reason):
            decoder.feed(ids)
    for _ in range(2):
        decoder.feed(random_ids(1, 1))
    with pytest.raises(CacheFull):
        decoder.feed(random_ids(1, 1))
    assert captured.layers[0].kept == 22


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache")
def test_what_decodes_eagerly_on_cuda_says_why() -> None:
    methods = {
        "as long as the prefix": Method("m", Recompute(), DenseStore()),
        "transformers' own cache grows": Method("m", Full(), StockStore("fp8")),
        "wants 4 untimed steps, of which 2 run": METHODS["full"],
    }
    for reason, method in methods.items():
        cache = build_cache(MODEL, method, random_ids(1, 20), 2, kernel="reference")
        cache.last_logits = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
        decoder = decoder_for(MODEL, cache, untimed=2)
        assert reason in str(decoder.note) and decoder.kernel_name == cache.kernel_name
        assert decoder_for(MODEL, cache, graph=False).note is None


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_frequencies_that_change_with_the_length_decode_eagerly(family: str) -> None:
    """A replay would neither change them nor refuse the step that crosses the length."""
    model = tiny(family)
    cache = build_cache(model, METHODS["full"], random_ids(1, 20), 2, kernel="reference")
    cache.last_logits = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    assert "rotary frequencies change with the length" in str(decoder_for(model, cache).note)


def test_without_a_gpu_the_step_is_the_plain_one() -> None:
    decoder = decoder_for(MODEL, pair(MODEL, METHODS["full"], random_ids(1, 20), 2)[0])
    assert isinstance(decoder, EagerDecoder) and decoder.note is None and not decoder.is_graph


class NoStream:
    """Stands in for a CUDA stream, and for the block in which it is the current one."""

    def __init__(self, *others: object, **more: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class TapedCuda:
    """`torch.cuda` as far as `CudaGraph` uses it, with tapes for graphs."""

    Stream = stream = NoStream

    def __init__(self, state: list[Tensor]) -> None:
        self.main, self.state, self.captures = NoStream(), state, 0

    def current_stream(self) -> NoStream:
        return self.main

    def CUDAGraph(self) -> TapedGraph:
        return TapedGraph(self.state)

    def graph(self, graph: TapedGraph, stream: NoStream) -> TapedGraph:
        assert isinstance(stream, NoStream)
        self.captures += 1
        return graph


def test_the_order_of_warm_up_capture_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """KIVI over three flushes through `CudaGraph` itself: the capture changes nothing, the replay behind it does."""
    prompt, tokens = random_ids(1, 60, seed=1), random_ids(1, STEPS, seed=2)
    eager, captured = pair(MODEL, METHODS["kivi4"], prompt, STEPS)
    decode = DecodeStep(MODEL, captured)
    cuda = TapedCuda([*decode.mutable_state(), *(buffer.tensor for buffer in captured.buffers())])
    monkeypatch.setattr(torch, "cuda", cuda)
    decoder = GraphDecoder(MODEL, captured, decode, CudaGraph)
    got = [decoder.feed(tokens[:, i : i + 1]).clone() for i in range(STEPS)]
    monkeypatch.undo()
    for i in range(STEPS):
        torch.testing.assert_close(got[i], step(MODEL, tokens[:, i : i + 1], eager), atol=1e-9, rtol=0)
    check_equal(eager, captured)
    assert decoder.note is None and cuda.captures == 2  # the step and the flush
