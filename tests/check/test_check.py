"""`kvbench.check`: passes what is right, and catches methods that were broken on purpose."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.cache import rotary
from kvbench.cache.build import Method
from kvbench.cache.layer import SlotLayer
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import RotateBack
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseSlots, DenseStore, SlotShape, Store
from kvbench.check.__main__ import main
from kvbench.check.identities import Subject, Trial, method_identities, model_identities
from kvbench.check.subjects import entries_of
from kvbench.config.sources import BUILT_IN
from kvbench.kernels.cpu import CpuKernel
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import tiny
from tests.shared.models import random_llama

FULL = Method("full", Full(), DenseStore())
KEPT, MASKED = "what is kept is what the rule promises", "evicting equals masking the whole history"
TURNS, WHOLE = "prompts in turns do not affect each other", "a budget for everything equals full"
BATCH, STOCK = "rows of a batch do not affect each other", "the cache equals the model's own forward"


def trial_on(model: Any, *rules: KeepRule) -> Trial:
    ids = torch.randint(0, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    return Trial(model, ids[:, :48], ids[:, 48:], "auto", rules)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama(4, 2, 16, dtype=torch.float32)


DENSE = DenseStore()


def failed(model: Any, make: Callable[[int], KeepRule], store: Store = DENSE) -> set[str]:
    """The identities that do not hold for a rule, at a budget of 24."""
    subject = Subject("broken", lambda budget: Method("broken", make(budget or 24), store))
    return {v.identity for v in method_identities(trial_on(model, make(24)), subject, FULL) if not v.passed}


@pytest.mark.parametrize(
    "make",
    [
        H2O,
        StreamingLLM,
        lambda budget: StreamingLLM(budget, variant="absolute"),
        lambda budget: AdaKV(budget, inner=H2O(budget)),
    ],
    ids=["h2o", "streaming_llm", "absolute", "adakv"],
)
@pytest.mark.parametrize("store", [DenseStore(), PerToken(group_size=8)], ids=["dense", "int4"])
def test_right_methods_pass(model: Any, make: Callable[[int], KeepRule], store: Store) -> None:
    assert failed(model, make, store) == set()


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3"])
def test_right_methods_pass_where_layers_have_windows(family: str) -> None:
    model = tiny(family)
    assert failed(model, H2O) == set()
    unquantised = Method("kivi", Full(), Kivi(group_size=8, residual_length=64))
    assert all(verdict.passed for verdict in model_identities(trial_on(model), FULL, unquantised))


# ---------------------------------------------------------------- broken on purpose


class DropsSinks(StreamingLLM):
    """Scores by slot instead of by position, so the sinks go once slots are reused or sorted otherwise."""

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return position.to(torch.float64)


@dataclass(frozen=True)
class LeaksScores(H2O):
    """Keeps the first prompt's scores, and goes on with them for every other prompt."""

    kept: list[Tensor] = field(default_factory=list)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        scores = super().initial_scores(record)
        if len(self.kept) <= record.index:
            self.kept.append(scores)
        return self.kept[record.index].expand_as(scores)


class MixesRows(H2O):
    """Decides for the first row of a batch, and does the same in the others."""

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return super().priority(scores, position, newest, budget, layer)[:1].expand(position.shape)


class DropsNewest(KeepRule):
    """Gives up the token that has just come."""

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return -position.to(torch.float64)


class OffByOne(DenseSlots):
    """Writes the key beside the slot that was given up."""

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        super().overwrite((slot + 1) % self.length, key, value)


class OffByOneStore(DenseStore):
    def allocate(self, shape: SlotShape) -> DenseSlots:
        return OffByOne(shape, shape.dtype)


def test_dropped_sinks_are_caught(model: Any) -> None:
    assert KEPT in failed(model, DropsSinks)


def test_a_dropped_newest_token_is_caught(model: Any) -> None:
    assert KEPT in failed(model, DropsNewest)


def test_state_left_from_another_prompt_is_caught(model: Any) -> None:
    assert TURNS in failed(model, lambda budget: LeaksScores(budget, kept=[]))


def test_a_batch_that_mixes_its_rows_is_caught(model: Any) -> None:
    assert BATCH in failed(model, MixesRows)


def test_keys_in_the_wrong_slot_are_caught(model: Any) -> None:
    assert MASKED in failed(model, H2O, OffByOneStore())


def test_a_query_turned_the_wrong_way_is_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RotateBack.__call__
    for guard in ("_takes_back", "_turns_what_is_cached"):  # the engine's own guards would refuse it first
        monkeypatch.setattr(rotary, guard, lambda *_: True)
    monkeypatch.setattr(RotateBack, "__call__", lambda self, query, tokens: right(self, query, -tokens))
    assert MASKED in failed(model, StreamingLLM)


def test_positions_counted_in_kept_tokens_are_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotLayer, "get_seq_length", lambda self: self.kept)
    assert MASKED in failed(model, H2O)


def test_a_model_that_attends_otherwise_is_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotLayer, "get_seq_length", lambda self: self.seen + 1)
    unquantised = Method("kivi", Full(), Kivi(group_size=8, residual_length=64))
    verdicts = list(model_identities(trial_on(model), FULL, unquantised))
    assert [v.identity for v in verdicts if not v.passed] == [STOCK]


def test_a_kernel_that_is_wrong_is_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuKernel.attend

    def wrong(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        output, probabilities = right(*arguments, **named)
        return output * 1.001, probabilities

    monkeypatch.setattr(CpuKernel, "attend", wrong)
    assert "kernel cpu-c++ equals the reference" in failed(model, H2O)


# ---------------------------------------------------------------- the command

TINY = ["model=random-tiny", "data=random"]


def test_the_command_prints_a_line_an_identity(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "compare=[h2o,kivi4,snapkv+int4]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("pass") for line in lines[:-1])
    assert lines[-1].startswith(f"all {len(lines) - 1} hold")
    assert {line.split()[1] for line in lines[:-1]} == {"full", "kivi", "h2o", "kivi4", "snapkv+int4"}


def test_the_command_says_what_does_not_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotLayer, "get_seq_length", lambda self: self.kept)
    assert main([*TINY, "method=streaming_llm", "variant=absolute"]) == 3
    out = capsys.readouterr().out
    assert f"FAIL  streaming_llm    {MASKED}" in out
    assert "DO NOT HOLD" in out


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (16, "group=32 does not divide the head size 16; type one of: group=8, group=16"),
        (80, "group=32 does not divide the head size 80"),
        (100, "group=32 does not divide the head size 100; no multiple of 8 does; choose another store"),
        (120, "group=32 does not divide the head size 120; type one of: group=8, group=24"),
    ],
)
def test_a_store_that_does_not_fit_the_head_size_is_named_and_the_rest_runs(
    size: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, f"model.random.head_dim={size}", "compare=[kivi4,h2o]"]) == 0
    gate, first, *lines, last = capsys.readouterr().out.splitlines()
    assert gate.startswith("pass  full ") and "full cache equals the model's forward: max difference" in gate
    assert first.startswith("skip  kivi4 ") and reason in first
    assert {line.split()[1] for line in lines} >= {"full", "h2o"}
    assert all(line.startswith("pass") for line in lines)
    assert last.endswith("; 1 do not fit random-tiny and were skipped")


def test_the_only_method_that_was_named_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "model.random.head_dim=80", "method=kivi4"]) == 2
    assert "kivi4 does not fit random-tiny: group=32 does not divide the head size 80" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_offline_model_passes_whatever_its_type_and_threads(
    dtype: str, threads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    try:
        assert main([f"model.dtype={dtype}", f"threads={min(threads, os.cpu_count() or 1)}"]) == 0
    finally:
        torch.set_num_threads(before)
    assert "all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["method=h2o", "budget=1000000"], "budget="),
        (["method=h2oo"], "did you mean h2o"),
        (["h2o"], "KEY=VALUE"),
        (["compare=[h2o]", "store=int4"], "ambiguous"),
        (["method=h2o", "budget=0.0"], "budget="),
        (["kernel=abacus"], "kernel=abacus"),
    ],
)
def test_unusable_input_is_one_line(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert answer in lines[0]


def test_by_itself_it_tries_each_kind_of_method_and_store() -> None:
    config = BUILT_IN.composed(TINY)
    tried = [[word for word in entry if word not in TINY] for entry in entries_of(config, TINY, BUILT_IN)]
    every = list(entries_of(config, TINY, BUILT_IN, everything=True))
    assert tried[0] == ["method=full"] and ["method=h2o", "budget=96"] in tried
    assert ["method=snapkv", "store=int4", "budget=96"] in tried
    assert len(every) >= 3 * len(tried)


@pytest.mark.slow
def test_everything_that_ships_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "all"]) == 0, capsys.readouterr().out
