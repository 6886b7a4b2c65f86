"""What methods share a prefill, and what becomes of them where memory does not hold it for all, or for one."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache, check_model, prefill
from kvbench.cache.decode import step
from kvbench.cache.observe import ColumnSums, LastQueries
from kvbench.cache.record import LayerRecord, RecordLayer
from kvbench.cache.store import DenseStore
from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.measures import fallbacks as measured
from kvbench.measures.context import RunContext
from kvbench.measures.fallbacks import Fallback, fallbacks_for
from kvbench.measures.fidelity import Fidelity
from kvbench.measures.fidelity.continuations import continue_prompts
from kvbench.measures.latency import Latency
from kvbench.measures.latency import decode_times as latency_module
from kvbench.measures.latency.decode_times import time_decoding
from kvbench.measures.needle import Needle
from kvbench.measures.needle.answers import ask_needles
from kvbench.measures.out_of_memory import give_memory_back
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.perplexity.windows import score_windows
from kvbench.measures.tasks import Tasks
from kvbench.measures.tasks.answers import answer_tasks
from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV
from kvbench.results.loading import find_runs, load
from kvbench.results.row import Row
from tests.cache.test_mla import deepseek
from tests.measures.test_tasks import write
from tests.shared.families import random_ids, tiny
from tests.shared.models import random_llama
from tests.shared.paths import ROOT
from tests.shared.text import CHARACTERS, character_tokenizer, light, methods, prose, rows_of, run_context_of

MODEL = random_llama(4, 2, 16, vocab=len(CHARACTERS) + 1)
TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(1_000), add_special_tokens=False)["input_ids"])
CONTEXT = 60
ALONE, ON_HOST, BOTH = Fallback(False, False).note, Fallback(True, True).note, Fallback(False, True).note
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with light():
        yield


class SmallMemory:
    """Runs out where what prefills record would take more than `limit` bytes. Counts what is alive.

    held, most: bytes now, and at most. left: bytes alive where each prefill began; `most_of` it: at most during it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int | None = None, error: Exception = ERRORS[0]) -> None:
        self.limit, self.error, self.held = limit, error, 0
        self.left, self.most_of = list[int](), list[int]()
        for observation in (ColumnSums, LastQueries):
            monkeypatch.setattr(observation, "compute", self._counting(observation.compute))
        monkeypatch.setattr(RecordLayer, "update", self._holding(RecordLayer.update))
        for module in (measured, latency_module):
            monkeypatch.setattr(module, "prefill", self._watched(prefill))

    def take(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if self.limit is not None and self.held + size > self.limit:
            raise type(self.error)(*self.error.args)  # a new one: it holds the frames that it goes through
        self.held += size
        self.most_of[-1] = max(self.most_of[-1], self.held)
        weakref.finalize(tensor, self._give_back, size)
        return tensor

    def _give_back(self, size: int) -> None:
        self.held -= size

    def _counting(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments: self.take(compute(*arguments))

    def _holding(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def counted(layer: RecordLayer, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
            return update(layer, self.take(key), self.take(value), *rest, **more)

        return counted

    def _watched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def prefilling(*arguments: Any) -> Any:
            self.left.append(self.held)
            self.most_of.append(self.held)
            return plain(*arguments)

        return prefilling


def observing() -> dict[str, Method]:
    """The baseline, and three methods that each ask for an observation of their own."""
    rules = {"h2o": H2O(12), "narrow": SnapKV(budget=12, window=6), "wide": SnapKV(budget=20, window=11)}
    return methods("full") | {name: Method(name, rule, DenseStore()) for name, rule in rules.items()}


MEASURES: dict[str, Callable[[RunContext], Iterator[Any]]] = {
    "perplexity": lambda bench: score_windows(bench, Perplexity(CONTEXT, 6, 2, 1)),
    "needle": lambda bench: ask_needles(bench, Needle([CONTEXT], [0.5], 2, ["before", "after"], 2)),
    "fidelity": lambda bench: continue_prompts(bench, Fidelity([CONTEXT], 6, 2, 1)),
    "tasks": lambda bench: answer_tasks(
        bench,
        Tasks(
            set="longbench",
            names=["hotpotqa"],
            samples=2,
            longest=CONTEXT + 15,
            question=["after"],
            path=str(write(Path(), "hotpotqa")),
        ),
    ),
}


def run(measure: str, named: dict[str, Method] | None = None) -> tuple[list[Row], RunContext]:
    here = run_context_of(MODEL, observing() if named is None else named, TEXT, TOKENIZER, save_kept=True)
    return rows_of(MEASURES[measure](here)), here


def needed(measure: str, monkeypatch: pytest.MonkeyPatch, named: dict[str, Method]) -> int:
    """Bytes of the largest record of the measure with these methods."""
    with monkeypatch.context() as patch:
        memory = SmallMemory(patch)
        run(measure, named)
    return max(memory.most_of)


@pytest.mark.parametrize("error", ERRORS, ids=["device", "python", "host"])
@pytest.mark.parametrize("measure", MEASURES)
def test_without_memory_for_all_each_prefills_for_itself(
    measure: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, before = run(measure)
    assert before.journal.failures == [] and before.journal.fallbacks == {}
    widest = needed(measure, monkeypatch, {k: m for k, m in observing().items() if k in ("full", "wide")})
    assert widest < needed(measure, monkeypatch, observing())
    memory = SmallMemory(monkeypatch, widest, error)
    rows, after = run(measure)
    assert after.journal.failures == [] and rows == plain  # to the bit
    assert after.journal.kept == before.journal.kept
    assert after.journal.fallbacks == dict.fromkeys(observing(), ALONE)
    assert len(memory.left) > len(observing()) and set(memory.left) == {0}  # nothing of a prefill outlives its use
    assert memory.held == 0


def test_of_a_prefill_of_its_own_a_cache_is_all_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = needed("perplexity", monkeypatch, {k: m for k, m in observing().items() if k in ("full", "wide")})
    memory, held = SmallMemory(monkeypatch, widest), list[int]()
    here = run_context_of(MODEL, observing(), TEXT)
    measured.each_cache(here, TEXT[None, :CONTEXT], lambda entry, cache: held.append(memory.held), 4, 1, "perplexity")
    assert held == [0] * 4 and here.journal.fallbacks.keys() == observing().keys()


@pytest.mark.parametrize("error", ERRORS[:2])
def test_on_a_gpu_the_record_goes_to_the_host_first(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the device holds no more than one layer of it."""
    plain, before = run("perplexity")
    monkeypatch.setattr(measured, "fallbacks_for", lambda device, n: fallbacks_for(torch.device("cuda"), n))
    memory = SmallMemory(monkeypatch, needed("perplexity", monkeypatch, observing()) - 1, error)
    rows, after = run("perplexity")
    assert rows == plain and after.journal.kept == before.journal.kept
    assert after.journal.fallbacks == dict.fromkeys(observing(), ON_HOST)
    whole, on_host = memory.most_of[:2]
    assert on_host <= 0.6 * whole and set(memory.left) == {0}  # two layers, and one


def test_the_host_may_be_too_small_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run("perplexity")

    def no_room(record: LayerRecord) -> LayerRecord:
        raise MemoryError

    monkeypatch.setattr(LayerRecord, "on_host", no_room)
    monkeypatch.setattr(measured, "fallbacks_for", lambda device, n: fallbacks_for(torch.device("cuda"), n))
    widest = needed("perplexity", monkeypatch, {k: m for k, m in observing().items() if k in ("full", "wide")})
    SmallMemory(monkeypatch, widest)
    rows, after = run("perplexity")
    assert rows == plain and after.journal.fallbacks == dict.fromkeys(observing(), ALONE)


def test_a_method_fails_where_its_own_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU after its own record has been tried in the host's memory; the ones after it begin with the device."""
    plain, _ = run("perplexity")
    narrow = needed("perplexity", monkeypatch, {k: m for k, m in observing().items() if k in ("full", "narrow")})
    for device, tried in (("cpu", [True, False]), ("cuda", [True, True, False, False])):
        with monkeypatch.context() as patch:
            patch.setattr(measured, "fallbacks_for", lambda _, n, device=device: fallbacks_for(torch.device(device), n))
            patch.setattr(LayerRecord, "on_host", lambda record: record)  # no relief
            memory = SmallMemory(patch, narrow)
            named = {name: observing()[name] for name in ("full", "wide", "narrow", "h2o")}
            rows, after = run("perplexity", named)
        ((label, row), *more) = after.journal.failures
        assert not more and (label, row.status, row.context) == ("wide", "oom", CONTEXT)
        assert "out of memory" in str(row.note)
        key = lambda row: (row.method, row.metric, row.position)  # noqa: E731
        assert sorted(rows, key=key) == sorted((row for row in plain if row.method != "wide"), key=key)
        assert after.journal.fallbacks == dict.fromkeys(("full", "narrow", "h2o"), ALONE)
        assert set(memory.left) == {0} and memory.held == 0
        assert [fallback.together for fallback in fallbacks_for(torch.device(device), 4)] == tried


def test_a_cache_that_does_not_fit_beside_the_record_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline's above all: the others are compared with it all the same."""
    plain, _ = run("perplexity")
    alone = needed("perplexity", monkeypatch, methods("full"))
    memory = SmallMemory(monkeypatch)

    def build(model: Any, method: Method, *rest: Any) -> Any:
        if memory.held > alone and method.name == "full":
            raise torch.OutOfMemoryError("no room for slots")
        return build_cache(model, method, *rest)

    monkeypatch.setattr(measured, "build_cache", build)
    rows, after = run("perplexity")
    assert rows == plain and after.journal.failures == [] and set(after.journal.fallbacks.values()) == {ALONE}


def test_memory_that_runs_out_while_a_token_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been scored until then counts once."""
    plain, before = run("perplexity")
    memory = SmallMemory(monkeypatch)
    update, alone = H2O.updated_scores, needed("perplexity", monkeypatch, methods("full", "h2o"))

    def tight(rule: H2O, scores: Tensor, probabilities: Tensor) -> Tensor:
        if memory.held > alone:
            raise torch.OutOfMemoryError("no room for probabilities")
        return update(rule, scores, probabilities)

    monkeypatch.setattr(H2O, "updated_scores", tight)
    rows, after = run("perplexity")
    assert rows == plain and after.journal.failures == [] and after.journal.kept == before.journal.kept
    assert after.journal.fallbacks == dict.fromkeys(("h2o", "narrow", "wide"), ALONE)  # the baseline was through


def test_an_error_that_is_none_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SmallMemory(monkeypatch, 0, ValueError("broken"))
    rows, after = run("perplexity")
    assert rows == [] and {row.status for _, row in after.journal.failures} == {"failed"}
    assert len(after.journal.failures) == len(observing()) and len(memory.left) == 1
    assert memory.held == 0


def test_what_a_failure_held_is_free_when_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SmallMemory(monkeypatch, needed("perplexity", monkeypatch, methods("full")) + 1)
    here = run_context_of(MODEL, observing(), TEXT)
    found: list[int] = []
    monkeypatch.setattr("kvbench.measures.context.give_memory_back", lambda: found.append(memory.held))
    with here.guarded(here.methods, "perplexity"):
        measured.prefill(MODEL, TEXT[None, :CONTEXT], [entry.method.rule for entry in here.methods])
    assert found == [0]
    assert [row.status for _, row in here.journal.failures] == ["oom"] * 4


# latency


def timed(named: dict[str, Method]) -> tuple[list[Row], RunContext]:
    here = run_context_of(MODEL, named, TEXT, TOKENIZER)
    return rows_of(time_decoding(here, Latency([CONTEXT], 4, 1))), here


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_latency_uses_the_same_fallbacks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = timed(observing())
    monkeypatch.setattr(latency_module, "fallbacks_for", lambda _, n: fallbacks_for(torch.device(device), n))
    with monkeypatch.context() as patch:
        memory = SmallMemory(patch)
        timed({k: m for k, m in observing().items() if k in ("full", "narrow")})
    narrow = max(memory.most_of)
    with monkeypatch.context() as patch:
        memory = SmallMemory(patch, narrow)
        rows, here = timed(observing())
    if device == "cuda":  # one layer at a time fits for all
        assert here.journal.failures == [] and here.journal.fallbacks == dict.fromkeys(observing(), ON_HOST)
    else:
        ((label, row),) = here.journal.failures
        assert (label, row.status, row.measure, row.context, row.batch) == ("wide", "oom", "latency", CONTEXT, 1)
        assert here.journal.fallbacks == dict.fromkeys(("full", "h2o", "narrow"), ALONE)
        assert len(here.journal.tracebacks) == 1
    done = here.journal.fallbacks.keys()
    # Methods that are timed alone have no full cache beside them to be a share of.
    described = [(row.method, row.metric, row.unit, row.n) for row in plain if row.method in done and not _paired(row)]
    assert [(row.method, row.metric, row.unit, row.n) for row in rows if not _paired(row)] == described  # each once
    for metric in ("prefill_ms", "observe_ms", "compress_ms", "ttft_ms"):
        of = {row.method: row.value for row in rows if row.metric == metric}
        assert of.keys() == done and (metric == "observe_ms" or min(of.values()) > 0)  # type: ignore[type-var]
        assert (len(set(of.values())) > 1) or (metric == "prefill_ms" and device == "cuda")  # a prefill each
    for metric in ("kept_tokens", "positions_processed", "engaged"):
        pick = lambda rows, metric=metric: [row.value for row in rows if row.metric == metric and row.method in done]  # noqa: E731
        assert pick(rows) == pick(plain)
    give_memory_back()
    assert memory.held == 0


def _paired(row: Row) -> bool:
    return row.metric == "tpot_to_full"


def test_a_method_that_runs_out_while_it_decodes_is_timed_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a first time, cut short, do not stand beside those of the second."""
    runs: list[str] = []
    plain = latency_module.generation

    def generation(bench: RunContext, settings: Any, entry: Any, record: Any) -> Any:
        runs.append(entry.label)
        if entry.label == "h2o" and len(bench.methods) > 1:
            raise torch.OutOfMemoryError("beside the record of all")
        return plain(bench, settings, entry, record)

    monkeypatch.setattr(latency_module, "generation", generation)
    rows, here = timed(observing())
    assert (
        runs == ["full", "h2o", "narrow", "wide", "h2o"]
        and here.journal.failures == []
        and here.journal.fallbacks == {"h2o": ALONE}
    )
    seen = [(row.method, row.metric) for row in rows]
    assert len(seen) == len(set(seen)) and ("h2o", "itl_p50_ms") in seen


# what rows say


def test_rows_say_how_they_were_prefilled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=random-tiny",
        "data=random",
        "measure=[perplexity,latency]",
        "perplexity.context=40",
        "perplexity.tokens=6",
        "latency.contexts=[40]",
        "latency.steps=4",
        "latency.warmup=1",
        'compare=["method=snapkv window=5","method=tova"]',
        "budget=12",
    ]
    assert main([*words, "results_dir=plain"]) == 0
    capsys.readouterr()

    def small(*arguments: Any) -> Any:
        if len(arguments) > 2 and len(arguments[2]) > 1:
            raise torch.OutOfMemoryError("all of them")
        return prefill(*arguments)

    monkeypatch.setattr(measured, "prefill", small)
    monkeypatch.setattr(latency_module, "prefill", small)
    assert main([*words, "results_dir=small"]) == 0
    plain, apart = (load(find_runs(folder)[0]) for folder in ("plain", "small"))
    # Methods that are timed alone have no full cache beside them.
    plain, apart = (frame[frame["metric"] != "tpot_to_full"] for frame in (plain, apart))
    assert set(apart["status"]) == {"ok"} and len(apart) == len(plain)
    assert apart["note"].str.endswith(ALONE).all() and not plain["note"].fillna("").str.contains("prefill of its").any()
    for metric in ("nll", "kl", "top1", "kept_tokens"):
        assert list(apart[apart["metric"] == metric]["value"]) == list(plain[plain["metric"] == metric]["value"])
    told = [line for line in capsys.readouterr().err.splitlines() if "out of memory" in line]
    assert told == [f"note: out of memory; next: {ALONE}"] * 2  # once a measure


# the record in the host's memory

RULES = ("h2o", "expected_attention", "keydiff", "lagkv+fp8", "adakv", "full+turbo4", "hf_fp8")


def settled(entry: str) -> Method:
    method = load_method(entry, budget=300)
    small = {"budget": 24, "window": 6, "block": 8, "n_sink": 2}
    fields = {name: value for name, value in small.items() if hasattr(method.rule, name) and method.rule.budget}
    if "inner" in vars(method.rule):
        return replace(method, rule=replace(method.rule, budget=24, inner=SnapKV(budget=24, window=6)))
    return replace(method, rule=replace(method.rule, **fields))


def all_buffers(cache: Any) -> list[Tensor]:
    return [tensor.contiguous() for _, tensor, _ in cache.buffers()]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "gpt2", "gpt-oss", "qwen3-next"])
def test_caches_are_the_same_from_a_record_in_the_host_s_memory(family: str) -> None:
    model, ids = tiny(family), random_ids(2, 44)
    found = 0
    for method in map(settled, RULES):
        try:
            check_model(model, method.rule)
            near, far = (prefill(model, ids[:, :40], [method.rule], on_host) for on_host in (False, True))
            caches = [build_cache(model, method, record, max_new_tokens=4) for record in (near, far)]
        except UserError:  # a family whose rotation cannot be taken back, or with windows that a stock cache has not
            continue
        found += 1
        assert {layer.home for layer in far.layers} == {torch.device("cpu")}
        assert not {storage.data_ptr() for storage in storages(near.layers)} & {
            storage.data_ptr() for storage in storages(far.layers)
        }
        for t in range(40, 44):
            a, b = (step(model, ids[:, t : t + 1], cache) for cache in caches)
            assert torch.equal(a, b), (method.name, t)
    assert found >= 5, found


def storages(layers: list[LayerRecord]) -> list[Any]:
    return [tensor.untyped_storage() for layer in layers for tensor in (layer.key, layer.value)]


@pytest.mark.parametrize("layout", ["latent", "absorbed"])
def test_latents_stay_one_thing_in_the_host_s_memory(layout: str) -> None:
    model, ids = deepseek(layout=layout), random_ids(2, 40)
    near, far = (prefill(model, ids, [H2O(budget=8)], on_host) for on_host in (False, True))
    for a, b in zip(near.layers, far.layers, strict=True):
        assert torch.equal(a.key, b.key) and torch.equal(a.value, b.value)
        assert a.token_numbers == b.token_numbers == a.key.shape[-1]
        home = b.at_home()
        assert home.is_shared and home.home is None and home.key.data_ptr() != b.key.data_ptr()


def test_keys_and_values_that_lie_in_one_storage_are_two_things() -> None:
    """GPT-2 cuts them out of one product."""
    (layer, *_) = prefill(tiny("gpt2"), random_ids(1, 20)).layers
    assert layer.key.untyped_storage().data_ptr() == layer.value.untyped_storage().data_ptr()
    assert layer.token_numbers == 2 * 4 * 16


# a host that is really small

PROGRAM = """
import json, resource
import torch
from kvbench.kernels import prefill as kernels
from kvbench.measures.perplexity.windows import score_windows
from kvbench.measures.perplexity import Perplexity
from tests.shared.models import random_llama
from kvbench.cache.build import Method
from kvbench.cache.store import DenseStore
from kvbench.methods.snapkv import SnapKV
from tests.shared.text import run_context_of, methods, rows_of

torch.set_num_threads(1)
model = random_llama(8, 2, 16, layers=4, dtype=torch.float32)
text = torch.randint(0, 97, (2000,), generator=torch.Generator().manual_seed(0))
named = {f"w{w}": Method(f"w{w}", SnapKV(budget=700, window=w), DenseStore()) for w in (600, 601, 602)}
named = methods("full") | named
bench = run_context_of(model, named, text)
CONTEXT = 1400
perplexity_of = lambda context: rows_of(score_windows(bench, Perplexity(context, 4, 1, 1)))
before = perplexity_of(CONTEXT), dict(bench.journal.fallbacks)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# A record of one method is 4 layers x 8 heads x 600 x 1400 floats: 108 MB; of three 323.
resource.setrlimit(resource.RLIMIT_AS, (used + 250 * 2**20,) * 2)
after = perplexity_of(CONTEXT), dict(bench.journal.fallbacks)
values = [[[row.method, row.metric, row.position, row.value] for row in rows] for rows, _ in (before, after)]
print(json.dumps([values, before[1], after[1], [label for label, _ in bench.journal.failures]]))
"""


def test_a_host_whose_memory_really_runs_out() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (large, small), before, after, failures = json.loads(done.stdout.splitlines()[-1])
    assert (before, failures) == ({}, []) and after == dict.fromkeys(("full", "w600", "w601", "w602"), ALONE)
    assert small == large
