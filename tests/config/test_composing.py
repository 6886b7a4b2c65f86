"""Composing once for all that differ in plain settings gives what Hydra gives for each."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

from kvbench.config import composing
from kvbench.config.composing import shared_compositions
from kvbench.config.sources import BUILT_IN
from kvbench.sweep.plan import plan_sweep

WORDS = [
    ["method=h2o", "budget=16"],
    ["method=h2o", "budget=0.25", "seed=3"],
    ["budget=24", "method=h2o", "variant=max"],
    ["method=kivi", "bits=2", "group=32", "budget=null"],
    ["store=int4", "bits=1e3"],
    ["budget=16", "budget=24"],
    ["perplexity.context=64", "budget=16", "measure=[perplexity]"],
    ["inner=snapkv", "method=adakv", "budget=-3"],
    ["variant='sum'", "budget=true"],
    ["variant=a b", "budget=16"],
]


@pytest.mark.parametrize(
    "text", ["1.10", "7e12345", "1_000", "-3", "0x1f", "true", "NaN", "7abc", "v1.10", "12.", ".5"]
)
def test_values_of_text_keys_stay_the_text_that_was_typed(text: str) -> None:
    found = BUILT_IN.composed(["model=hub", f"model.id={text}", f"model.revision={text}", f"data.split={text}"])
    assert (found.model.id, found.model.revision, found.data.split) == (text, text, text)
    assert BUILT_IN.composed(["model=hub", f"model.revision='{text}'"]).model.revision == text
    assert BUILT_IN.composed(["model=hub", "model.revision=null"]).model.revision is None


def test_a_sweep_over_numbers_as_text_is_a_sweep() -> None:
    jobs = BUILT_IN.jobs(["model=hub", "model.revision=1.10,main,2.0"])
    assert [BUILT_IN.composed(job).model.revision for job in jobs] == ["1.10", "main", "2.0"]


def test_shared_compositions_equal_hydras_own() -> None:
    alone = [BUILT_IN.composed(words) for words in WORDS]
    with shared_compositions():
        for words, expected in [*zip(WORDS, alone, strict=True)] * 2:
            found = BUILT_IN.composed(words)
            assert found == expected
            assert OmegaConf.to_yaml(found, resolve=True) == OmegaConf.to_yaml(expected, resolve=True)


def test_one_composition_does_not_change_another() -> None:
    with shared_compositions():
        first = BUILT_IN.composed(["budget=16"])
        first.perplexity.context = 1
        assert BUILT_IN.composed(["budget=24"]).perplexity.context != 1
        assert first.budget == 16 and BUILT_IN.composed([]).budget is None


def test_unknown_names_raise_hydras_errors() -> None:
    with shared_compositions():
        for words in (["method=h3o", "budget=16"], ["budget=[1"], ["bugdet=3"]):
            with pytest.raises(HydraException):
                BUILT_IN.composed(words)


def test_a_plan_of_many_budgets_composes_each_method_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(name: str, overrides: list[str]) -> object:
        made.append(overrides)
        return compose(name, overrides)

    monkeypatch.setattr(composing, "compose", counted)
    budgets = ",".join(str(16 + number) for number in range(21))
    started = time.process_time()
    plan_sweep(["method=h2o,snapkv,tova", f"budget={budgets}", f"results_dir={tmp_path}"], BUILT_IN, ["python"])
    assert len(made) == 4  # three methods and the full cache
    assert time.process_time() - started < 20  # 63 jobs: 19 s when each was composed by itself, 3 s now
