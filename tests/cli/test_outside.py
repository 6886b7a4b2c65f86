"""Methods, stores, measures and models from a folder outside the package work in every command as built-in ones do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.types import RunMode

from kvbench import load_method
from kvbench.check.__main__ import main as check
from kvbench.cli.fetch_for import nodes_of
from kvbench.cli.main import main
from kvbench.cli.plan import main as plan
from kvbench.config import ConfigSources
from kvbench.config.composing import ROOT, own_hydra
from kvbench.errors import UserError
from kvbench.harness.__main__ import main as harness
from kvbench.results.loading import find_runs, load
from tests.shared.outside import forget_outside, write_outside
from tests.shared.paths import ROOT as CHECKOUT
from tests.shared.paths import runs_by_time
from tests.shared.text import light

TINY = ["data=random", "measure=[memory]", "memory.contexts=[32]", "memory.tokens=2", "memory.isolate=false"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The outside folder, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    module = f"outside_{abs(hash(request.node.nodeid))}"
    with light():
        yield write_outside(tmp_path, module)
    forget_outside(module, tmp_path)


def rows_of(method: str) -> dict[tuple[str, str | None], Any]:
    """Rows of one metric of a method, by store and knobs."""
    frame = load("results")
    chosen = frame[(frame["method"] == method) & (frame["metric"] == "kept_tokens")]
    return {(row["store"], row["knobs"]): row for _, row in chosen.iterrows()}


def test_a_method_with_a_knob_of_its_own_in_a_comparison(own: Path) -> None:
    """`every_stride=3` reaches the method that declares it, and no other; an entry may set it for itself."""
    entries = 'compare=[every+rounded,knorm,"method=every every_stride=5"]'
    words = [*TINY, "model=mine-tiny", entries, "budget=12", "every_stride=3", "rounded_to=float16"]
    assert main(["--config-dir", str(own), *words]) == 0
    every = rows_of("every")
    three, five = '{"every_stride": 3, "rounded_to": "float16"}', '{"every_stride": 5}'
    assert every.keys() == {("rounded", three), ("dense", five)}
    assert all("every_stride" not in str(knobs) for _, knobs in rows_of("knorm"))
    assert {row["model"] for row in every.values()} == {"mine-tiny"}


def test_the_knob_changes_the_resume_key_of_its_method_only(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"hydra.searchpath=[file://{own}]", *TINY, "model=random-tiny", "compare=[every,knorm]", "budget=12"]
    assert main([*words, "every_stride=2"]) == 0
    assert main([*words, "every_stride=4"]) == 0
    second = load(runs_by_time("results")[-1])
    assert set(second["method"]) == {"every"}


def test_a_sweep_packs_outside_and_built_in_methods_into_one_job_with_one_prefill(own: Path) -> None:
    (own / "method" / "other.yaml").write_text(
        (own / "method" / "every.yaml").read_text().replace("name: every", "name: other")
    )
    words = ["model=random-tiny", "data=random", "method=every,other,knorm", "budget=12", "every_stride=2,3"]
    words += ["measure=[perplexity]", "perplexity.context=32", "perplexity.tokens=2", "perplexity.windows=2"]
    assert main(["-m", *words, "--config-dir", str(own)]) == 0
    runs = [load(folder) for folder in runs_by_time("results")]
    assert [set(run["method"]) for run in runs] == [{"full", "every", "other", "knorm"}, {"every", "other"}]
    (module,) = [sys.modules[name] for name in sys.modules if name.startswith("outside_")]
    assert len(module.BUILT_FROM) == 4
    assert module.BUILT_FROM[0] == module.BUILT_FROM[1] and module.BUILT_FROM[2] == module.BUILT_FROM[3]


def test_an_outside_measure_is_measured_beside_a_built_in_one(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "model=random-tiny", "measure=[entropy,memory]", "entropy.context=32", "method=every", "budget=12"]
    assert main(["--config-dir", str(own), *words]) == 0
    assert "entropy" in capsys.readouterr().out.lower()
    frame = load("results")
    entropies = frame[frame["metric"] == "entropy"]
    assert set(entropies["method"]) == {"full", "every"} and set(entropies["context"]) == {32}
    assert entropies["value"].between(0, 5.6).all()  # log of 256 tokens
    assert main(["--config-dir", str(own), *words]) == 0
    assert "were measured before" in capsys.readouterr().out


def test_a_sweep_over_a_setting_of_an_outside_measure(own: Path) -> None:
    words = ["model=random-tiny", "data=random", "measure=[entropy]", "entropy.context=32,48", "method=every,knorm"]
    assert main(["-m", f"hydra.searchpath=[file://{own}]", *words, "budget=12", "entropy.tokens=2"]) == 0
    runs = [load(folder) for folder in runs_by_time("results")]
    assert [set(run["method"]) for run in runs] == [{"full", "every", "knorm"}] * 2
    assert {int(context) for run in runs for context in run["context"]} == {32, 48}


IN_A_JOB = """
import pickle, sys
import kvbench.config
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

instances, loader, master = pickle.load(sys.stdin.buffer)
Singleton._instances = instances
Plugins.instance()
words = ["method=every", "++every_stride=3", "entropy.context=7", "budget=9", "model=mine-tiny"]
config = loader.load_sweep_config(master, words)
print(config.method.rule.stride, config.entropy.context, config.entropy.tokens, config.model.name, config.budget)
"""


def test_what_launchers_send_to_another_process_composes_there(own: Path) -> None:
    """Launchers pickle Hydra's singletons, its config loader and the config of the sweep."""
    sources = ConfigSources.of([f"--config-dir={own}"])
    sources.register()
    with own_hydra():
        loader = GlobalHydra.instance().config_loader()
        words = sources.words
        master = loader.load_configuration(ROOT, words, RunMode.MULTIRUN)
        instances = {kind: one for kind, one in Singleton.get_state()["instances"].items() if kind is ConfigStore}
        sent = pickle.dumps((instances, loader, master))
    command = [sys.executable, "-c", IN_A_JOB]
    done = subprocess.run(command, input=sent, capture_output=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert done.stdout.decode() == "3 7 8 mine-tiny 9\n", done.stderr.decode()


@pytest.mark.slow
def test_jobs_of_a_launcher_find_the_folder(own: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["-m", f"--config-dir={own.name}", *TINY, "model=mine-tiny", "method=every,knorm", "budget=12,14"]
    assert main([*words, "every_stride=2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]) == 0
    assert {row["budget"] for row in rows_of("every").values()} <= {12, 14}
    assert len(find_runs("results")) == 2


def test_the_help_lists_outside_names(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "--config-dir", str(own)]) == 0
    shown = capsys.readouterr().out
    assert "every " in shown and "keeps every n-th token: budget=, every_stride= (2)" in shown
    assert "every_stride " in shown and "distance between kept tokens" in shown
    assert "rounded " in shown and "mine-tiny" in shown
    assert "entropy " in shown and "entropy of the predictions after a prompt" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method=evry"], "method=evry is unknown (did you mean every?); choose from "),
        (["store=roundd"], "did you mean rounded?"),
        (["model=mine"], "did you mean mine-tiny?"),
        (["measure=[entrpy]"], "measure=entrpy is unknown (did you mean entropy?); choose from entropy, error"),
        (["entropy.contxt=3"], "entropy.contxt is no setting (did you mean entropy.context?)"),
        (["measure=[entropy]", "entropy.tokens=0"], "entropy.tokens=0 is not a whole number of at least 1"),
        (["method=every", "every_strid=2"], "every_strid is no setting (did you mean every_stride?)"),
        (["compare=['method=every evry_stride=2']"], "sets evry_stride (did you mean every_stride?)"),
        (["method=every", "every_stride=2,3"], "type -m every_stride=2,3 to run one after another"),
    ],
)
def test_unknown_names_are_answered_with_outside_names(
    own: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if words[0].startswith("model") else ["model=random-tiny"]
    assert main(["--config-dir", str(own), *TINY, *given, *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config-dir"], "--config-dir names no folder"),
        (["--config-dir=nowhere"], "nowhere is no folder"),
        (["hydra.searchpath=[pkg://no_such_package.conf]"], "pkg://no_such_package.conf cannot be imported"),
        (["hydra.searchpath=3"], "hydra.searchpath=3 is not a list of folders"),
        (["hydra.searchpath=[s3://bucket]"], "does not know s3://"),
        (["--config-dir=."], "holds none of the folders method, store"),
    ],
)
def test_folders_that_cannot_be_used(
    own: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_name_that_ships_with_kvbench_is_refused(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "method" / "h2o.yaml").write_text("name: h2o\n")
    assert main(["--config-dir", str(own), "method=h2o"]) == 2
    assert "own holds method/h2o.yaml, and so does kvbench; rename one of them" in capsys.readouterr().err


def test_check_tests_an_outside_method(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=random-tiny", "data=random", "compare=[every+rounded]", "every_stride=3", "budget=96"]
    assert check(["--config-dir", str(own), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[1] == "every+rounded" for line in lines[:-1]) >= 3


def test_plan_lists_outside_methods_and_stores(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=mine-tiny", "context=100", "compare=[every,full+rounded]", "budget=50"]
    assert plan(["--config-dir", str(own), *words]) == 0
    shown = capsys.readouterr().out
    assert "mine-tiny" in shown and "every " in shown and "full+rounded " in shown


def test_harness_takes_an_outside_method(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-dir", str(own), "model=mine-tiny", "method=every", "every_stride=3", "tasks=x", "limit=many"]
    assert harness(words) == 2
    assert "limit=many is neither a number of documents" in capsys.readouterr().err


def test_fetch_for_knows_outside_models(own: Path) -> None:
    ((model, data),) = nodes_of(f"-m --config-dir {own} model=mine-tiny data=random method=every")
    assert (model["name"], data["name"]) == ("mine-tiny", "random")


def test_python_takes_the_folder_and_the_knob(own: Path) -> None:
    method = load_method("every+rounded", config_dir=own, budget=12, every_stride=7)
    assert (method.rule.stride, method.rule.budget) == (7, 12)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="did you mean every_stride"):
        load_method("every", config_dir=own, budget=12, every_strid=7)
