"""Commands of the card can be typed, and the bytes that its facts name are those of `kvbench.plan`."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from kvbench.cli.plan import main as plan
from kvbench.cli.words import check_words
from kvbench.config import chosen_measures, method_configs
from kvbench.config.sources import BUILT_IN
from kvbench.report.advice.answer_card import answer_card
from kvbench.report.advice.card import FACTS, CardLine
from kvbench.report.advice.what_to_run import data_setting
from kvbench.report.compare.methods import groups_of
from kvbench.results.row import Row
from tests.report.synthetic import FULL, OTHER, cache, line_on


def check(command: str) -> None:
    """Composes a command of kvbench."""
    python, module, name, *words = shlex.split(command)
    assert (python, module, name) == ("python", "-m", "kvbench")
    settings = check_words(words, BUILT_IN)
    config = BUILT_IN.composed(settings)
    assert method_configs(config, settings)[0].is_baseline and chosen_measures(config)


def lines_of(rows: list[Row]) -> list[CardLine]:
    card = answer_card(groups_of(rows))
    assert card is not None
    return card.lines


@pytest.mark.parametrize("model", ["smollm2-135m", "org/Toy-135M", "/tmp/model", "a.gguf"])
def test_what_to_run_can_be_typed_for_every_need_and_model(model: str) -> None:
    rows = [replace(row, model=model) for row in FULL]
    for line in (line for line in lines_of(rows) if line.key != "architecture"):
        assert line.command is not None
        check(line.command)
        assert ("model=" in line.command) == (model in ("smollm2-135m", "org/Toy-135M"))
    half = lines_of([*rows, *(replace(row, model=model) for row in cache("full", 30, 0.001, **OTHER))])[0]
    assert half.command is not None and half.command.endswith(" model.dtype=bfloat16")  # in float32 nothing is smaller
    check(half.command)


@pytest.mark.parametrize(
    "rows",
    [
        cache("full", 10, 0.001, **OTHER),
        cache("h2o", 10, 0.001, store="int4", budget=256.0, variant="mean", knobs='{"decode": "append", "odd": 1}'),
        cache("streaming_llm", 10, 0.001, budget=0.25, sinks=0),
        cache("kivi4", 10, 0.001, store="kivi4", bits=4, k_bits=4, v_bits=4, group=32),
    ],
    ids=["int4", "h2o", "streaming_llm", "kivi4"],
)
def test_the_command_for_a_method_names_all_its_knobs(rows: list[Row]) -> None:
    line = line_on([*FULL, *rows], "chat", windows=9)
    assert line.command is not None
    check(line.command)
    row = rows[0]
    named = shlex.split(line.command)
    assert f"method={row.method}" in named and ("odd=1" not in named)
    for name in ("budget", "sinks", "variant", "bits", "group"):
        if getattr(row, name) is not None:
            assert any(word.startswith(f"{name}=") for word in named)


@pytest.mark.parametrize(
    ("dataset", "setting"),
    [("essays+bible+code", "data=mixed"), ("essays", None), ("code", "data=code"), ("mine.txt", None), (None, None)],
)
def test_the_command_measures_the_texts_that_were_scored(dataset: str | None, setting: str | None) -> None:
    assert data_setting(dataset) == setting
    rows = [replace(row, dataset=dataset) for row in [*FULL, *cache("full", 10, 0.001, **OTHER)]]
    command = line_on(rows, "extreme", windows=9).command
    assert command is not None and ([word for word in shlex.split(command) if word.startswith("data=")] or [None]) == [
        setting
    ]
    check(command)


def size_in(text: str, before: str) -> float:
    """The GiB that stand behind some words."""
    found = re.search(re.escape(before) + r"\)? ([\d.]+) GiB", text)
    assert found is not None, before
    return float(found[1])


@pytest.mark.parametrize(
    ("words", "before"),
    [
        ("model=llama3.1-8b model.kv_heads=32", "(MHA)"),
        ("model=llama3.1-8b", "(GQA)"),
        ("model=llama3.1-8b model.kv_heads=1", "(MQA)"),
        ("model=deepseek-v2-lite model.mla=expand", "expanded heads"),
        ("model=deepseek-v2-lite model.mla=latent", "(MLA)"),
    ],
)
def test_bytes_of_architectures_are_those_of_the_plan(
    words: str, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan([*words.split(), "method=full", "context=32768", "tokens=1"]) == 0
    found = re.search(r"full cache ([\d.]+) ([GM])iB", capsys.readouterr().out)
    assert found is not None
    planned = float(found[1]) / (1 if found[2] == "G" else 1024)
    text = next(fact.text for fact in FACTS if fact.title == "A new model")
    assert size_in(text, before) == pytest.approx(planned, abs=0.006)


def test_facts_name_sinks_external_retrieval_and_commands_that_can_be_typed() -> None:
    assert "sinks" in FACTS[0].text and "external retrieval" in FACTS[1].text
    for fact in (fact for fact in FACTS if fact.command is not None and "kvbench " in fact.command):
        check(fact.command or "")
