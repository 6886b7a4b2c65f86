"""What docs/extending.md shows works outside the package: its files are written to a folder, tested and run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from kvbench import load
from kvbench.cli.main import main
from kvbench.report.__main__ import main as report
from tests.docs.pages import files, write_files
from tests.shared.paths import ROOT

PAGE = "docs/extending.md"
FILES = files(PAGE)
METHOD = ["dilated.py", "conf/method/dilated.yaml", "test_dilated.py"]
STORE = ["keys16.py", "conf/store/keys16.yaml"]
MEASURE = ["entropy.py", "conf/measures/entropy.yaml", "test_entropy.py"]
OWN = ["--config-dir", "conf", "model=random-tiny", "data=random", "threads=1"]
PERPLEXITY = ["measure=[perplexity]", "perplexity.context=60", "perplexity.tokens=12"]
ENTROPY = ["measure=[entropy]", "entropy.context=60", "entropy.tokens=4", "entropy.windows=3"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, as the current folder."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


def functions_of(name: str) -> dict[str, object]:
    """What a test file of the page defines."""
    space: dict[str, object] = {"__name__": Path(name).stem}
    exec(compile(FILES[name], name, "exec", dont_inherit=True), space)
    return space


def test_the_page_shows_a_method_a_store_and_a_measure() -> None:
    assert list(FILES) == [*METHOD, *STORE, *MEASURE]
    assert len(FILES["dilated.py"].splitlines()) < 40
    assert sum(len(FILES[name].splitlines()) for name in ("entropy.py", "conf/measures/entropy.yaml")) <= 60
    for name in FILES:
        assert not list(ROOT.glob(f"[ckm]*/**/{Path(name).name}")), "it must not ship with kvbench"


def test_the_method_s_own_test_passes(mine: Path) -> None:
    space = functions_of("test_dilated.py")
    keeps = space["test_it_keeps_sinks_the_newest_tokens_and_a_grid"]
    (parameters,) = keeps.pytestmark  # type: ignore[attr-defined]
    for prompt, budget in parameters.args[1]:
        keeps(prompt, budget)  # type: ignore[operator]
    space["test_a_dilation_of_zero_is_refused"]()  # type: ignore[operator]


def test_the_measure_s_own_test_passes(mine: Path) -> None:
    functions_of("test_entropy.py")["test_a_budget_for_every_token_gives_the_full_cache_s_entropy"]()  # type: ignore[operator]


def test_help_lists_what_the_folder_adds(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-dir", "conf", "--help"]) == 0
    shown = capsys.readouterr().out
    for line in ("keeps sinks, the newest", "keys in bfloat16", "entropy of the next-token", "distance between"):
        assert line in shown


@pytest.mark.parametrize("dilation", [4, 5])
def test_the_command_line_measures_the_method_on_a_store_of_its_choice(
    mine: Path, capsys: pytest.CaptureFixture[str], dilation: int
) -> None:
    words = [*OWN, *PERPLEXITY, "budget=20", "save_kept=true", f"dilation={dilation}", "compare=[dilated+int4]"]
    assert main(words) == 0, capsys.readouterr().err
    frame = load("results")
    row = frame[(frame["method"] == "dilated") & (frame["metric"] == "kept_tokens")].iloc[0]
    assert (row["store"], row["budget"], row["sinks"], row["value"]) == ("int4", 20, 1, 20)
    assert f'"dilation": {dilation}' in row["knobs"]
    (saved,) = Path("results").glob("*/kept.parquet")
    tokens = pd.read_parquet(saved)
    heads = tokens.groupby(["sample", "layer", "head"])["position"].apply(list)
    # 71 tokens were fed: the first, the newest nine, and the ten newest multiples of `dilation` before them.
    grid = list(range(0, 62, dilation))[-10:]
    assert all(kept == [0, *grid, *range(62, 71)] for kept in heads)


def test_the_store_holds_keys_in_half_the_bytes_of_values(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So a cache takes three quarters of float32, with and without eviction, and predicts nearly the same."""
    words = [*OWN, *PERPLEXITY, "memory.contexts=[60]", "measure=[perplexity,memory]", "memory.isolate=false"]
    assert main([*words, "budget=20", "compare=[full,full+keys16,h2o,h2o+keys16]"]) == 0, capsys.readouterr().err
    frame = load("results")
    held = frame[frame["metric"] == "held_bytes.dense"].set_index(["measure", "method", "store"])["value"]
    for method in ("full", "h2o"):
        assert held["memory", method, "keys16"] == 0.75 * held["memory", method, "dense"]
    loss = frame[(frame["metric"] == "kl") & (frame["store"] == "keys16") & (frame["method"] == "full")]
    assert abs(loss["value"].item()) < 1e-5


def test_a_sweep_measures_the_measure_and_the_report_draws_it(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OWN, "-m", *ENTROPY, "method=full,dilated", "budget=20,30"]) == 0, capsys.readouterr().err
    frame = load("results")
    assert set(frame["measure"]) == {"entropy"}
    assert set(frame.loc[frame["method"] == "dilated", "budget"]) == {20, 30}
    at = frame[(frame["metric"] == "entropy_at") & (frame["method"] == "full")]
    assert sorted(set(at["position"])) == [60, 61, 62, 63]
    assert report(["results"]) == 0
    page = Path("results/report/report.md").read_text()
    table = page.split("Entropy\n")[1]
    assert "dilated" in table and "entropy" in table
