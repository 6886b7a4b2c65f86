"""kvbench.verify: an honest folder passes to the bit, and every way of altering one fails in its own check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml  # type: ignore[import-untyped]

from kvbench.cli.main import main as run
from kvbench.results.loading import find_runs
from kvbench.results.verification import VerifyRecord, read_record, why_not_verified
from kvbench.verify.__main__ import main
from kvbench.verify.draw import Unit, drawn, escape_chance, fewest_caught
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, light, prose

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
ALL = "samples=1000"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder of a tiny model with a chat template: perplexity, retrieval and memory."""
    home = tmp_path_factory.mktemp("verify")
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = CHAT
    random_llama(4, 2, 16, vocab=len(tokenizer) + 1, dtype=torch.float32).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    (home / "text.txt").write_text(prose(4000))
    (home / "other.txt").write_text(prose(4000, seed=1))
    with light():
        words = [
            *(f"model.path={home / 'model'}", f"data.path={home / 'text.txt'}", f"results_dir={home / 'results'}"),
            *(
                "compare=[full,h2o,kivi4]",
                "budget=32",
                "group=8",
                "residual=16",
                "measure=[perplexity,needle,memory]",
                "threads=1",
            ),
            *("perplexity.context=64", "perplexity.tokens=8", "perplexity.windows=10", "perplexity.batch=5"),
            *("needle.lengths=[400]", "needle.depths=[0.5]", "needle.samples=2", "needle.template=chat"),
            *("needle.answer_tokens=4", "memory.contexts=[96]", "memory.isolate=false", "needle.batch=2"),
        ]
        assert run(words) == 0
        yield find_runs(home / "results")[0]


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(honest, copy)
    return copy


def record(folder: Path, *words: str) -> VerifyRecord:
    code = main([str(folder), *words])
    found = read_record(folder)
    assert found is not None and code == (0 if found.passed else 3)
    return found


def failed(found: VerifyRecord) -> set[str]:
    return {check.name for check in found.checks if not check.passed}


def test_an_honest_folder_passes_to_the_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = record(folder, ALL, "salt=mine")
    assert (found.passed, found.exact, found.differs, found.salted) == (True, True, [], True)
    assert found.drawn == found.population == 10 * 3 + 2 * 3 + 3
    assert why_not_verified(folder) is None
    assert "equal to the bit" in capsys.readouterr().out
    (folder / "samples.jsonl").write_text((folder / "samples.jsonl").read_text() + "\n")
    assert why_not_verified(folder) == "changed since it was verified"


def test_another_source_is_named_and_compared_with_tolerance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_json(folder / "provenance.json", lambda content: content | {"source_hash": "0" * 64})
    found = record(folder, "samples=2")
    assert (found.passed, found.same_source, found.differs) == (True, False, ["the source"])
    assert "note  not as when it was measured: the source" in capsys.readouterr().out


Alter = Callable[[Path], None]


def change_json(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def row(change: Callable[[dict[str, Any]], None], **where: Any) -> Alter:
    """Change the first row that fits."""

    def alter(folder: Path) -> None:
        table = pq.read_table(folder / "metrics.parquet")
        rows = table.to_pylist()
        change(next(one for one in rows if all(one[key] == value for key, value in where.items())))
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "metrics.parquet")

    return alter


def times(key: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def change(one: dict[str, Any]) -> None:
        one[key] *= factor

    return change


def samples(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Alter:
    def alter(folder: Path) -> None:
        file = folder / "samples.jsonl"
        lines = change([json.loads(line) for line in file.read_text().splitlines()])
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return alter


def config(change: Callable[[dict[str, Any]], None]) -> Alter:
    def alter(folder: Path) -> None:
        content = yaml.safe_load((folder / "config.yaml").read_text())
        change(content)
        (folder / "config.yaml").write_text(yaml.safe_dump(content))

    return alter


def entry(measure: str, number: int, name: str, value: Any) -> Alter:
    """One score of h2o in one sample of a measure."""

    def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        mine = [line for line in lines if line["measure"] == measure][number]
        next(one for one in mine["methods"] if one["method"] == "h2o")[name] = value
        return lines

    return samples(change)


def one_row_less(folder: Path) -> None:
    """The row kl of h2o is taken out, and status.json counts one less."""
    table = pq.read_table(folder / "metrics.parquet")
    rows = table.to_pylist()
    rows.remove(next(one for one in rows if one["metric"] == "kl" and one["method"] == "h2o"))
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "metrics.parquet")
    change_json(folder / "status.json", lambda status: status | {"rows": status["rows"] - 1})


def other_answers(folder: Path) -> None:
    """Answers become another text with the same score: no row speaks of their words."""
    samples(
        lambda lines: [
            line | {"methods": [one | ({"answer": "?"} if "answer" in one else {}) for one in line["methods"]]}
            for line in lines
        ]
    )(folder)


H2O = {"method": "h2o"}
QUICK = ("a mean", "a window's NLL", "a sample less", "another text", "another template")
ALTERED: dict[str, tuple[Alter, str]] = {
    "a mean": (row(times("value", 0.99), metric="kl", **H2O), "rows"),
    "a bound": (row(times("low", 1.1), metric="nll", **H2O), "rows"),
    "a number of samples": (row(times("n", 2), metric="nll", **H2O), "rows"),
    "hits": (row(lambda one: one.update(value=2.0), metric="hits", **H2O), "rows"),
    "a row less": (one_row_less, "rows"),
    "x smaller": (row(times("value", 1.001), metric="x_smaller", measure="perplexity", method="h2o"), "arithmetic"),
    "a mean by position": (row(times("value", 1.01), metric="nll_at", **H2O), "arithmetic"),
    "bytes that were scored": (
        row(times("value", 0.5), metric="held_bytes", measure="perplexity", method="h2o"),
        "rerun",
    ),
    "bytes of memory": (row(times("value", 0.5), metric="slack_bytes", measure="memory", method="h2o"), "rerun"),
    "answers": (other_answers, "rerun"),
    "a window's NLL": (entry("perplexity", 3, "nll", 1.0), "rerun"),
    "a sample less": (samples(lambda lines: lines[1:]), "samples"),
    "a sample twice": (samples(lambda lines: [lines[0], *lines]), "samples"),
    "another order": (samples(lambda lines: [lines[1], lines[0], *lines[2:]]), "samples"),
    "another text": (
        config(lambda one: one["data"].update(path=one["data"]["path"].replace("text", "other"))),
        "samples",
    ),
    "another template": (config(lambda one: one["needle"].update(template="base")), "samples"),
    "another budget": (config(lambda one: one["methods"][1]["rule"].update(budget=48)), "settings"),
    "another method": (row(lambda one: one.update(budget=16.0), **H2O), "settings"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALTERED]
)
def test_what_was_altered_fails_in_its_own_check(folder: Path, name: str) -> None:
    alter, check = ALTERED[name]
    alter(folder)
    found = record(
        folder, ALL if check in ("rerun", "samples") else "samples=1"
    )  # ALL: also the missing sample's batch
    assert check in failed(found), found.checks
    assert why_not_verified(folder) is not None


def test_a_changed_template_of_the_tokenizer_fails(folder: Path, honest: Path) -> None:
    """The model's folder, not the run's, was changed: prompts have other tokens."""
    file = honest.parents[1] / "model" / "chat_template.jinja"
    before = file.read_text()
    try:
        file.write_text(before.replace("<bot>", "<you>"))
        assert "samples" in failed(record(folder, "samples=1"))
    finally:
        file.write_text(before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "no such file"),
        (["results/reference"], "run folders; give one"),
        (["a", "b"], "2 folders given"),
        (["a", "samples=0"], "samples=0 is not a whole number"),
        (["a", "sample=3"], "sample=3 is no setting"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_missing_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(lambda one: one["model"].update(path="/nosuch/model"))(folder)
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_draw_follows_content_source_and_word() -> None:
    units = [Unit(0, sample, label) for sample in range(40) for label in ("full", "h2o")]
    one = drawn(units, 8, "content", "source", "")
    assert len(set(one)) == 8 and one == drawn(list(reversed(units)), 8, "content", "source", "")
    for words in (("other", "source", ""), ("content", "other", ""), ("content", "source", "word")):
        assert drawn(units, 8, *words) != one
    assert len(drawn(units, 1000, "content")) == 80


def test_the_chance_to_escape_is_the_share_of_draws_without_an_altered_sample() -> None:
    """Every draw of 3 among 9 is counted."""
    for altered in range(8):
        draws = list(combinations(range(9), 3))
        missed = sum(min(draw) >= altered for draw in draws)
        assert escape_chance(9, 3, altered) == pytest.approx(missed / len(draws))
    fewest = fewest_caught(546, 8)
    assert escape_chance(546, 8, fewest) <= 0.05 < escape_chance(546, 8, fewest - 1)
