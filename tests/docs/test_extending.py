"""What docs/extending.md shows works outside the package: its files are written to a folder, tested and run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from kvbench import load
from kvbench.cli.main import main
from tests.docs.pages import files

FILES = files("docs/extending.md", "")
METHOD = ["dilated.py", "conf/method/dilated.yaml", "test_dilated.py"]
STORE = ["keys16.py", "conf/store/keys16.yaml"]
TINY = ["model=random-tiny", "data=random", "measure=[perplexity]", "perplexity.context=60", "perplexity.tokens=12"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, as the current folder."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


def test_the_page_shows_a_method_its_yaml_and_its_test() -> None:
    assert {*METHOD, *STORE} <= set(FILES)
    assert len(FILES["dilated.py"].splitlines()) < 60


def test_the_method_s_own_test_passes(mine: Path) -> None:
    space: dict[str, object] = {"__name__": "test_dilated"}
    exec(compile(FILES["test_dilated.py"], "test_dilated.py", "exec", dont_inherit=True), space)
    keeps, refused = (
        space["test_it_keeps_sinks_the_newest_tokens_and_a_grid"],
        space["test_a_dilation_of_zero_is_refused"],
    )
    (parameters,) = keeps.pytestmark  # type: ignore[attr-defined]
    for prompt, budget in parameters.args[1]:
        keeps(prompt, budget)  # type: ignore[operator]
    refused()  # type: ignore[operator]


def test_the_command_line_measures_the_method_on_a_store_of_its_choice(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"hydra.searchpath=[file://{mine / 'conf'}]", *TINY, "budget=20", "save_kept=true", "threads=1"]
    assert main([*words, "compare=[dilated+int4]"]) == 0, capsys.readouterr().err
    frame = load("results")
    row = frame[(frame["method"] == "dilated") & (frame["metric"] == "kept_tokens")].iloc[0]
    assert (row["store"], row["budget"], row["sinks"], row["value"]) == ("int4", 20, 1, 20)
    (saved,) = Path("results").glob("*/kept.parquet")
    tokens = pd.read_parquet(saved)
    heads = tokens.groupby(["sample", "layer", "head"])["position"].apply(list)
    # 71 tokens were fed: the first, the newest nine, and the ten newest multiples of four before them.
    assert all(kept == [0, *range(24, 61, 4), *range(62, 71)] for kept in heads)


def test_the_store_holds_keys_in_half_the_bytes_of_values(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So a cache takes three quarters of float32, with and without eviction, and predicts nearly the same."""
    words = [f"hydra.searchpath=[file://{mine / 'conf'}]", *TINY, "threads=1", "memory.contexts=[60]"]
    words = [*words, "measure=[perplexity,memory]", "memory.isolate=false", "budget=20"]
    assert main([*words, "compare=[full,full+keys16,h2o,h2o+keys16]"]) == 0, capsys.readouterr().err
    frame = load("results")
    held = frame[frame["metric"] == "held_bytes.dense"].set_index(["measure", "method", "store"])["value"]
    for method in ("full", "h2o"):
        assert held["memory", method, "keys16"] == 0.75 * held["memory", method, "dense"]
    loss = frame[(frame["metric"] == "kl") & (frame["store"] == "keys16") & (frame["method"] == "full")]
    assert abs(loss["value"].item()) < 1e-5
