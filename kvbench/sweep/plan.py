"""Planning a sweep: its jobs as Hydra's sweeper splits them, and the cells of each job. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import ConfigSources, chosen_measures, method_configs
from kvbench.config.composing import shared_compositions
from kvbench.errors import UserError
from kvbench.files import to_json, write_atomic, writing_to
from kvbench.measures.measure import Measure, read_measure
from kvbench.results.folder import check_writable, clean_label
from kvbench.results.ledger import RERUN
from kvbench.results.leftovers import remove_leftovers
from kvbench.sweep.cells import Cell, cell_of, common_of, parts_of
from kvbench.sweep.plan_files import PLAN, Sweep, short_hash

NO_PART_OF_THE_NAME = ("rerun=", "results_dir=", "skip_larger=", "hydra.", "hydra/", "-")
"""Words that change how a sweep runs and not what it measures: with others of them it is the same sweep."""


LAUNCHERS = {
    "slurm": ("hydra_submitit_launcher", "sweep"),
    "local": ("hydra_submitit_launcher", "sweep"),
    "joblib": ("hydra_joblib_launcher", "sweep"),
    "ray": ("hydra_ray_launcher", "ray"),
}
"""hydra/launcher=: the plugin that it needs and the extra that brings it."""


@dataclass(frozen=True)
class Job:
    """What the command line hands to a run.

    results: done cells are looked for below it. folder: where the run folder goes, `results` or a sweep's folder below
    it. since: when the command began, in seconds since the epoch. command: as typed, where a launcher started this
    process.
    """

    results: Path
    folder: Path
    rerun: str | None = None
    skip_larger: bool = True
    since: float = 0.0
    command: list[str] | None = None


def job_of(config: DictConfig, sweep: Sweep | None) -> Job:
    """The job that a composed config describes. Raises UserError for a switch that is none."""
    if config.rerun not in RERUN:
        raise UserError(f"rerun={config.rerun} is unknown; type rerun=failed, rerun=all or nothing")
    if not isinstance(config.skip_larger, bool):
        raise UserError(f"skip_larger={config.skip_larger} is not true or false")
    if not isinstance(config.results_dir, str) or not config.results_dir:
        raise UserError(f"results_dir={config.results_dir} is no folder; type results_dir=results")
    results = Path(config.results_dir)
    if sweep is None:
        return Job(results, results, config.rerun, config.skip_larger, time.time())
    return Job(results, sweep.folder, config.rerun, config.skip_larger, sweep.started, sweep.command)


def cells_of(config: DictConfig, overrides: list[str]) -> list[Cell]:
    """The cells of a job, without their keys. Raises UserError, and Hydra's errors for unknown names and keys."""
    methods = method_configs(config, overrides)
    common = common_of(config)
    return [cell_of(method, part, common) for part in parts_of(measures_of(config)) for method in methods]


def measures_of(config: DictConfig) -> list[Measure]:
    """The measures that a composed config selects, with their settings. Raises UserError for those it cannot use."""
    return [read_measure(name, node_of(config, name)) for name in chosen_measures(config)]


def node_of(config: DictConfig, name: str) -> dict[str, Any]:
    """A node of the config as a plain mapping. Raises UserError where a value stands in its place."""
    node = OmegaConf.to_container(config[name], resolve=True) if OmegaConf.is_dict(config[name]) else config[name]
    if not isinstance(node, dict):
        raise UserError(f"{name}={node} is not a group of settings; type {name}.KEY=VALUE")
    return {str(key): value for key, value in node.items()}


def plan_sweep(words: Sequence[str], sources: ConfigSources, command: list[str]) -> Sweep:
    """Compose every job of the words under -m and write the plan; nothing is launched.

    A job whose methods contradict each other is planned as refused and costs the others nothing. Raises UserError, and
    Hydra's errors for unknown names and keys, before anything is made.
    """
    started = time.time()
    if any(word.startswith("hydra/sweeper=") for word in words):
        raise UserError("hydra/sweeper= is not supported: cells are planned from Hydra's own sweeper; leave it out")
    jobs: list[dict[str, Any]] = []
    cells: dict[str, Cell] = {}
    results: set[str] = set()
    reruns: set[str | None] = set()
    with shared_compositions():
        for overrides in expand(words, sources):
            config = sources.composed(overrides)
            of_job = job_of(config, None)
            results.add(str(of_job.results))
            reruns.add(of_job.rerun)
            planned: dict[str, Any] = {"overrides": overrides, "cells": [], "refused": None}
            try:
                found = {cell.id: cell for cell in cells_of(config, [*sources.words, *overrides])}
                cells |= found
                planned["cells"] = list(found)
            except UserError as error:
                planned["refused"] = str(error)
            jobs.append(planned)
    if len(results) != 1:
        given = ", ".join(sorted(results))
        raise UserError(f"a sweep writes to one results folder, not to {given}; type one results_dir=")
    if len(reruns) != 1:
        raise UserError("a sweep takes one rerun=; type rerun=failed, rerun=all or nothing")
    root = Path(results.pop()).absolute()
    folder = root / sweep_name(words)
    check_writable(folder)
    plan = {
        "command": command,
        "started": started,
        "rerun": reruns.pop(),
        "results": "..",
        "jobs": jobs,
        "cells": [cell.record() for cell in cells.values()],
    }
    with writing_to(folder, "sweep folder"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        write_atomic(folder / PLAN, to_json(plan))
    return Sweep(folder, started, command)


def launcher_of(words: Sequence[str]) -> str | None:
    """The launcher that the words name, None for jobs in this process. Raises UserError where it is not installed."""
    name = next((word.split("=", 1)[1] for word in words if word.startswith("hydra/launcher=")), None)
    if name in LAUNCHERS:
        plugin, extra = LAUNCHERS[name]
        found = find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{plugin}") is not None
        if not found:
            package = plugin.replace("_", "-")
            raise UserError(f"hydra/launcher={name} needs {package}; type pip install 'kvbench[{extra}]'")
    return name


def check_hydra_folders(words: Sequence[str]) -> None:
    """Raise UserError for a folder of Hydra's own that cannot be made, before Hydra tries to."""
    given = {key: value.strip("'\"") for key, _, value in (word.partition("=") for word in words) if value}
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        if key in given:
            check_writable(given[key], key)
    subdir = given.get("hydra.sweep.subdir", "")
    if ".." in Path(subdir).parts:
        raise UserError(f"hydra.sweep.subdir '{subdir}' leaves the sweep's own folder; type a name without ..")
    if os.path.isabs(subdir):  # a relative one lies in hydra.sweep.dir
        check_writable(subdir, "hydra.sweep.subdir")


def expand(words: Sequence[str], sources: ConfigSources) -> list[list[str]]:
    """The overrides of each job of the words under -m."""
    return sources.jobs([word for word in words if not word.startswith(("-", "hydra.", "hydra/"))])


def sweep_name(words: Sequence[str]) -> str:
    """`sweep_budget-256-1000-method-h2o_1a2b3c4d`: the same for the same cells, in whatever order they are typed."""
    asked = sorted(word for word in words if not word.startswith(NO_PART_OF_THE_NAME))
    return f"sweep_{clean_label(' '.join(asked))[:40].strip('-')}_{short_hash(asked)}"
