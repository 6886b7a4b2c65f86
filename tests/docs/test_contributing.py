"""The method that CONTRIBUTING.md shows is built from the document: its file, its yaml, its test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import kvbench.methods
from kvbench.cli.main import main
from kvbench.results.loading import load
from tests.shared.paths import ROOT

DOCUMENT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", DOCUMENT, re.S | re.M))
TINY = ["model=random-tiny", "data=random", "measure=[perplexity]", "perplexity.context=60", "perplexity.tokens=12"]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The document's files on disk, where the package and Hydra find them beside those that ship."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(kvbench.methods, "__path__", [*kvbench.methods.__path__, str(tmp_path / "methods")])
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_document_holds_a_method_its_yaml_and_its_test() -> None:
    assert list(FILES) == ["methods/dilated.py", "conf/method/dilated.yaml", "tests/test_methods_dilated.py"]
    assert len(FILES["methods/dilated.py"].splitlines()) < 60
    assert not (ROOT / "methods" / "dilated.py").exists()


def test_its_own_test_passes(built: Path) -> None:
    space: dict[str, object] = {"__name__": "test_methods_dilated"}
    exec(compile(FILES["tests/test_methods_dilated.py"], "test_methods_dilated.py", "exec", dont_inherit=True), space)
    keeps, refused = space["test_it_keeps_sinks_the_newest_and_a_grid"], space["test_a_dilation_of_nothing_is_refused"]
    (parameters,) = keeps.pytestmark  # type: ignore[attr-defined]
    for prompt, budget in parameters.args[1]:
        keeps(prompt, budget)  # type: ignore[operator]
    refused()  # type: ignore[operator]


def test_the_command_line_measures_it_on_a_store_of_its_choice(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"hydra.searchpath=[file://{built / 'conf'}]", *TINY, "budget=20", "save_kept=true", "threads=1"]
    assert main([*words, "compare=[dilated+int4]"]) == 0, capsys.readouterr().err
    frame = load("results")
    row = frame[(frame["method"] == "dilated") & (frame["metric"] == "kept_tokens")].iloc[0]
    assert (row["store"], row["budget"], row["sinks"], row["value"]) == ("int4", 20, 1, 20)
    (saved,) = Path("results").glob("*/kept.parquet")
    tokens = pd.read_parquet(saved)
    heads = tokens.groupby(["sample", "layer", "head"])["position"].apply(list)
    # 71 tokens were fed: the first, the newest nine, and the ten newest multiples of four before them.
    assert all(kept == [0, *range(24, 61, 4), *range(62, 71)] for kept in heads)
