"""Slow tests, and those that need a Slurm, are left out unless asked for; the real model is loaded once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.models.checkpoint import model_spec
from kvbench.models.load import LoadedModel, load_model
from kvbench.offline import fetched_folder


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.markexpr:
        nightly = os.environ.get("KVBENCH_NIGHTLY") == "1"
        config.option.markexpr = "not slurm" if nightly else "not slow and not slurm"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The fetched model's folder. Fails, with the command to type, where it was not fetched."""
    return fetched_folder("model", "smollm2-135m")


@pytest.fixture(scope="session")
def essays_folder() -> Path:
    return fetched_folder("text", "essays")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 on the CPU. Shared: leave it as it is."""
    return load_model(model_spec({"fetched": "smollm2-135m", "device": "cpu"}))
