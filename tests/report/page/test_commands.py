"""The command beside a line of a table measures that line: composed, it gives the same method and settings."""

from __future__ import annotations

import json
import shlex

import pytest

from kvbench.config import MethodConfig, entry_overrides, method_config
from kvbench.config.sources import BUILT_IN
from kvbench.report.page.commands import RecordedRun, command_of
from kvbench.results.recorded_config import read_config
from kvbench.results.row import KNOBS, Row

ENTRIES = (
    "full",
    "kivi4",
    "kivi bits=2 residual=64",
    "h2o budget=256",
    "h2o+int4 budget=128",
    "snapkv budget=256",
    "streaming_llm budget=0.25 sinks=2",
    "random budget=256 seed=3",
    "full+rot3",
    "full+fp8",
    "adakv budget=256",
)


def composed(words: list[str]) -> MethodConfig:
    return method_config(BUILT_IN.composed(words))


def row_of(method: MethodConfig) -> Row:
    columns = {name: method.columns[name] for name in KNOBS if method.columns.get(name) is not None}
    others = {"seed": method.columns["seed"]} if method.columns.get("seed") else {}
    knobs = json.dumps(method.others | others) or None
    return Row(method=method.name, store=method.store, knobs=knobs, measure="perplexity", context=512, **columns)


@pytest.mark.parametrize("preset", ["", "experiment=reference "])
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_command_gives_the_same_method(entry: str, preset: str) -> None:
    name, *knobs = entry.split()
    method = composed([*entry_overrides(name), *knobs])
    sweep = f"python -m kvbench -m {preset}budget=128,256 perplexity.context=512,1024 needle.samples=2 threads=1"
    command = command_of(row_of(method), RecordedRun(sweep))
    assert command is not None
    words = shlex.split(command)[3:]
    config = BUILT_IN.composed(words)
    assert method_config(config).effective == method.effective
    assert config.compare is None and config.measure == ["perplexity"]
    assert config.perplexity.context == 512 and config.threads == 1
    assert not any(word.startswith(("needle", "budget=128,256")) for word in words)


def test_a_swept_setting_takes_the_value_of_the_run(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: one}\nperplexity: {windows: 4}\n")
    sweep = "python -m kvbench -m model=one,two perplexity.windows=2,4 method=full"
    row = Row(method="full", store="dense", measure="perplexity", context=64)
    command = command_of(row, RecordedRun(sweep, read_config(tmp_path)))
    assert command is not None
    assert shlex.split(command)[3:] == [
        "method=full",
        "measure=[perplexity]",
        "model=one",
        "perplexity.windows=4",
        "perplexity.context=64",
    ]
    assert command_of(row, RecordedRun("pytest")) is None


def test_settings_of_other_measures_are_left_out_also_of_measures_from_outside() -> None:
    config = {"measure": ["entropy", "surprise"], "entropy": {"contexts": [64], "bins": 4}, "surprise": {"rank": 2}}
    run = RecordedRun("python -m kvbench measure=[entropy,surprise] entropy.bins=4 surprise.rank=2 threads=1", config)
    command = command_of(Row(method="full", store="dense", measure="entropy", context=64), run)
    assert command is not None
    words = ["method=full", "measure=[entropy]", "entropy.bins=4", "threads=1", "entropy.contexts=[64]"]
    assert shlex.split(command)[3:] == words
