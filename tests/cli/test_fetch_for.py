"""`python -m kvbench.fetch --for`: everything that a command names, and what a job says that lacks something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.cli.fetch import main
from kvbench.cli.fetch_for import nodes_of
from kvbench.cli.main import main as kvbench
from kvbench.results import provenance


def test_every_job_of_a_sweep_is_looked_at() -> None:
    found = list(nodes_of("-m method=full,h2o model=smollm2-135m,random-tiny data=essays,random sweep.pack=none"))
    models = {(model["fetched"], data["fetched"]) for model, data in found}
    assert models == {("smollm2-135m", "essays"), ("smollm2-135m", None), (None, "essays"), (None, None)}


def test_for_names_what_is_there(smollm2_folder: Path, essays_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--for", "-m model=smollm2-135m,random-tiny data=essays budget=256,1000"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"smollm2-135m: {smollm2_folder}",
        "random-tiny: random weights, nothing to fetch",
        f"essays: {essays_folder}",
    ]


def test_a_text_in_a_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some words")
    assert main(["--for", f"model=random-tiny data.path={tmp_path / 'text.txt'}"]) == 0
    assert "10 characters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("method=h3o", "method=h3o is unknown"),
        ("model=random-tiny data=pg19", "leaves no copy"),
        ("model.path=nowhere data=random", "model.path=nowhere does not exist"),
        ("model=random-tiny data.path=nowhere", "data.path=nowhere does not exist"),
        ("model.id=org/name data=random", "the hub cannot be reached"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: str, line: str
) -> None:
    monkeypatch.setattr("kvbench.cli.fetch_for.hub_reachable", lambda: False)
    assert main(["--for", overrides]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and line in error


def test_nothing_named_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "nothing is named" in capsys.readouterr().err


def test_a_job_that_lacks_its_model_names_the_command_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    results = tmp_path / "results"
    assert kvbench(["method=full", "data=random", f"results_dir={results}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m kvbench.fetch smollm2-135m" in error
    assert not results.exists()
    assert kvbench(["-m", "method=full", "data=random", f"results_dir={results}"]) == 2  # the parent tells it too
    assert "python -m kvbench.fetch smollm2-135m" in capsys.readouterr().out


SMI = """#!/bin/sh
case "$1" in
*throttle*) exit 1 ;;
*clocks*) echo "1980, 1980, 2619, 700.00" ;;
*) echo "NVIDIA H200, GPU-1234, 570.1, 143771" ;;
esac
"""


def test_a_gpu_is_recorded_with_what_its_driver_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert provenance.gpus() == [
        {
            "name": "NVIDIA H200",
            "uuid": "GPU-1234",
            "driver": "570.1",
            "memory_mib": "143771",
            "clock_sm_mhz": "1980",
            "clock_sm_max_mhz": "1980",
            "clock_memory_mhz": "2619",
            "power_limit_w": "700.00",
        }
    ]
