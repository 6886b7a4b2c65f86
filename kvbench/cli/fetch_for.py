"""`python -m kvbench.fetch --for "OVERRIDES"`: download every model and text that a command or a sweep names.

For nodes without a network: run it where there is one, with the caches (`KVBENCH_CACHE`, `HF_HOME`) on a disk that the
nodes see.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.downloads import fetch
from kvbench.config import take_sources
from kvbench.config.error_lines import user_error
from kvbench.errors import UserError
from kvbench.hub import hub_reachable
from kvbench.models.checkpoint import ModelSpec, local_path, model_spec
from kvbench.sweep.plan import expand, node_of
from kvbench.texts.load import DataSpec, data_spec, load_text

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*", "onnx/*")
"""Weights in other formats, which are not downloaded where a repository has safetensors."""


def fetch_for(overrides: str, accept_license: bool = False) -> Iterator[str]:
    """Download what the overrides of a command name; yields one line for each model and text when it is complete.

    Raises UserError and Hydra's errors for overrides that cannot be used, UserError for what cannot be fetched.
    """
    models: list[ModelSpec] = []
    texts: dict[DataSpec, dict[str, Any]] = {}
    for model, data in nodes_of(overrides):
        spec = model_spec(model)
        models += [] if spec in models else [spec]
        texts.setdefault(data_spec(data), dict(data))
    for spec in models:
        yield fetch_model(spec, accept_license)
    for text, node in texts.items():
        yield fetch_text(text, node)


def nodes_of(overrides: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The `model` and `data` nodes of each job of the overrides, as typed behind `python -m kvbench [-m]`."""
    sources, words = take_sources(shlex.split(overrides))
    settings = [word for word in words if not word.startswith(("-", "sweep.pack="))]
    try:
        configs = [sources.composed(job) for job in expand(settings, sources)]
    except (HydraException, OmegaConfBaseException) as error:
        raise user_error(error, sources) from error
    for config in configs:
        yield node_of(config, "model"), node_of(config, "data")


def fetch_model(spec: ModelSpec, accept_license: bool = False) -> str:
    """Download a model; one line that says where it lies."""
    if spec.random:
        return f"{spec.name}: random weights, nothing to fetch"
    if spec.id is None:
        folder = local_path(spec) if spec.path is not None else fetch(str(spec.fetched), accept_license)
        return f"{spec.name}: {folder}"
    if not hub_reachable():
        raise UserError(f"model.id={spec.id}: the hub cannot be reached; type this where there is a network")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = HfApi().list_repo_files(spec.id, revision=spec.revision)
        others = OTHER_WEIGHTS if any(file.endswith(".safetensors") for file in files) else ()
        folder = snapshot_download(spec.id, revision=spec.revision, ignore_patterns=list(others))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"cannot fetch model.id={spec.id}: {' '.join(str(error).split())[:300]}") from error
    return f"{spec.id}: {folder}"


def fetch_text(spec: DataSpec, node: Mapping[str, Any]) -> str:
    """Download a text; one line that says what it is."""
    if spec.random_tokens is not None:
        return f"{spec.name}: random tokens, nothing to fetch"
    if spec.texts is not None:
        return f"{spec.name}: {', '.join(str(fetch(name)) for name in spec.texts)}"
    if spec.fetched is not None and spec.id is None and spec.path is None:
        return f"{spec.name}: {fetch(spec.fetched)}"
    if spec.id is not None and spec.limit is not None:
        raise UserError(
            f"data={spec.name} is read as a stream and leaves no copy for nodes without a network: save it to a "
            "file and type data.path=FILE, or data.limit=null to have all of it"
        )
    text = load_text(node)
    return f"{spec.name}: {len(text.text):,} characters{'' if spec.path is None else f', {Path(spec.path)}'}"
