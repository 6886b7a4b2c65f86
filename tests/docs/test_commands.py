"""Every command in README, CONTRIBUTING and docs/ can be typed: it composes, is read by its parser, or runs."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvbench.cli.fetch_for import nodes_of
from kvbench.cli.main import main
from kvbench.cli.plan import main as plan
from kvbench.cli.status import main as status
from kvbench.cli.words import check_words, without_pack
from kvbench.config import chosen_measures, method_configs, take_sources
from kvbench.config.sources import BUILT_IN
from kvbench.errors import EXIT_SOME_FAILED
from kvbench.harness.__main__ import spelled
from kvbench.harness.settings import read_asked
from kvbench.offline import RECIPES
from kvbench.report.__main__ import main as report
from kvbench.report.page.board import main as board
from kvbench.verify.__main__ import read_words
from tests.docs.pages import commands, write_files
from tests.shared.paths import ROOT

Check = Callable[[list[str], Path, pytest.MonkeyPatch], None]


def kvbench(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Composed, with the methods of `compare` and the measures; of a sweep its first job.

    For --config-dir the files of docs/extending.md stand in the current folder.
    """
    if "--config-dir" in words:
        write_files("docs/extending.md", folder)
    sources, others = take_sources(words)
    if "--help" in others:
        assert main(words) == 0
        return
    settings = without_pack(check_words(others, sources))
    settings = [word for word in settings if "=" in word and not word.startswith("hydra")]
    settings = [word if "[" in word else re.sub(r"=([\w.]+),.*", r"=\1", word) for word in settings]
    config = sources.composed(settings)
    assert method_configs(config, [*sources.words, *settings])[0].is_baseline
    assert chosen_measures(config)


def kvbench_report(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Read by its parser, with a run folder wherever it looks for one. Other tests draw."""
    run = next((ROOT / "results" / "reference" / "first_light").glob("metrics.parquet")).parent
    for word in words:
        path = folder / word
        if not word.startswith("-") and not path.exists() and not word.startswith("compared"):
            shutil.copytree(run, path / "run", ignore=shutil.ignore_patterns("report"))
    patch.setattr("kvbench.report.page.write.write_report", lambda paths, out: out)
    patch.setattr("kvbench.report.page.write.write_changes", lambda old, new, out: (None, ""))
    assert report(words) == 0


def kvbench_status(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs on a folder that holds one run."""
    (folder / words[0]).mkdir(parents=True, exist_ok=True)
    run = ROOT / "results" / "reference" / "first_light"
    shutil.copytree(run, folder / words[0] / "run", ignore=shutil.ignore_patterns("report"))
    assert status(words) in (0, EXIT_SOME_FAILED)


def kvbench_plan(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs, with one method instead of all."""
    one = [] if any(word.startswith(("method=", "compare=")) for word in words) else ["method=h2o"]
    assert plan([*words, *one]) == 0


def kvbench_check(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Composed: the checks themselves take a minute, and tests/check/ runs them."""
    kvbench([word for word in words if word != "all"], folder, patch)


def kvbench_fetch(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Names that can be fetched; with --for, settings that compose."""
    if words[0] == "--for":
        assert list(nodes_of(words[1]))
    else:
        assert set(words) <= set(RECIPES)


def kvbench_harness(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    settings = [spelled(word, BUILT_IN) for word in words]
    config = BUILT_IN.composed(settings)
    assert method_configs(config, settings)[0].is_baseline
    assert read_asked(config.harness).tasks


def kvbench_verify(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Read by its parser; tests/verify/ measures."""
    path, samples, _ = read_words(words)
    assert samples >= 1 and str(path).startswith("results/")


def kvbench_board(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs on a folder that holds one run, which is not verified."""
    run = ROOT / "results" / "reference" / "first_light"
    shutil.copytree(run, folder / words[0] / "run", ignore=shutil.ignore_patterns("report"))
    assert board(words) == 0


MODULES: dict[str, Check] = {
    "kvbench": kvbench,
    "kvbench.report": kvbench_report,
    "kvbench.status": kvbench_status,
    "kvbench.plan": kvbench_plan,
    "kvbench.check": kvbench_check,
    "kvbench.fetch": kvbench_fetch,
    "kvbench.harness": kvbench_harness,
    "kvbench.verify": kvbench_verify,
    "kvbench.board": kvbench_board,
}
TOOLS = ("ruff", "mypy", "pytest", "mkdocs")


def installable(target: str) -> bool:
    """Whether `pip install TARGET` names this package, with extras that pyproject.toml has."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.fullmatch(r"(?:kvbench|\.)(?:\[([\w,]+)\])?", target)
    return found is not None and set(filter(None, (found[1] or "").split(","))) <= set(extras)


def check_program(words: list[str]) -> None:
    """A script that exists, or pip with this package."""
    if words[:2] == ["pip", "install"]:
        assert installable(words[-1]), words[-1]
    elif words[0] in ("python", "bash") and words[1].startswith("scripts/"):
        assert (ROOT / words[1]).is_file(), words[1]
        paths = [word.split("::")[0] for word in words[2:] if word.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths), paths
    else:
        pytest.fail(f"no test knows how to check: {shlex.join(words)}")


@pytest.mark.parametrize("command", commands())
def test_every_command_can_be_typed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # KVBENCH_NIGHTLY=1 and the like
        words = words[1:]
    if words[:2] != ["python", "-m"]:
        check_program(words)
    elif words[2] in TOOLS:
        assert words[2] == "mkdocs" or find_spec(words[2]) is not None
    else:
        assert words[2] in MODULES, f"no test knows how to check {words[2]}"
        MODULES[words[2]](words[3:], tmp_path, monkeypatch)


def test_a_wrong_command_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="nosuch"):
        kvbench(["method=nosuch"], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        kvbench_fetch(["nosuch"], tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check_program(["pip", "install", "kvbench[nosuch]"])
