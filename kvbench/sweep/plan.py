"""A sweep: its jobs as Hydra's sweeper will make them, the plan of its cells, and what became of each job.

A sweep has a folder below the results folder, named after what it asks for, so that the same command finds it again:
`plan.json` (written before anything is launched), one `job_<hash>.json` a job, the run folders, and `launcher/` with
whatever the launcher writes. No torch here: planning happens where the command is typed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import ConfigSources, chosen_measures, method_configs
from kvbench.config.composing import shared_compositions
from kvbench.errors import UserError
from kvbench.files import read_json, to_json, write_atomic
from kvbench.measures.measure import Measure, read_measure
from kvbench.results.claims import beating, this_process
from kvbench.results.folder import check_writable, clean_label
from kvbench.results.ledger import RERUN
from kvbench.sweep.cells import Cell, cell_of, common_of, parts_of

PLAN, LAUNCHER = "plan.json", "launcher"
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


@dataclass(frozen=True)
class Sweep:
    """A planned sweep, as each of its jobs gets to know it."""

    folder: Path
    started: float
    command: list[str]

    def job_file(self, overrides: Sequence[str]) -> Path:
        return self.folder / f"job_{_hash(overrides)}.json"


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
    rerun: str | None = None
    with shared_compositions():
        for overrides in expand(words, sources):
            config = sources.composed(overrides)
            of_job = job_of(config, None)
            results.add(str(of_job.results))
            rerun = of_job.rerun
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
    folder = Path(results.pop()).absolute() / sweep_name(words)
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "command": command,
        "started": started,
        "rerun": rerun,
        "results": "..",
        "jobs": jobs,
        "cells": [cell.record() for cell in cells.values()],
    }
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


def expand(words: Sequence[str], sources: ConfigSources) -> list[list[str]]:
    """The overrides of each job of the words under -m."""
    return sources.jobs([word for word in words if not word.startswith(("-", "hydra.", "hydra/"))])


def sweep_name(words: Sequence[str]) -> str:
    """`sweep_budget-256-1000-method-h2o_1a2b3c4d`: the same for the same cells, in whatever order they are typed."""
    asked = sorted(word for word in words if not word.startswith(NO_PART_OF_THE_NAME))
    return f"sweep_{clean_label(' '.join(asked))[:40].strip('-')}_{_hash(asked)}"


def _hash(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(sorted(words)).encode()).hexdigest()[:8]


@contextmanager
def job_record(sweep: Sweep | None, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What a job of a sweep came to, in a file of its own: the block sets `code` and, where it has one, `error`.

    Touched while the block runs, so that other machines see a living process.
    """
    outcome: dict[str, Any] = {"code": None, "error": None}
    if sweep is None:
        yield outcome
        return
    begun = {"overrides": list(overrides), "owner": this_process(), "started": time.time()}
    file = sweep.job_file(overrides)
    with suppress(OSError):  # on a full disk the cells, which matter more, say so themselves
        file.touch()  # an empty file needs no room, and tells that the job has begun
        write_atomic(file, to_json(begun | outcome))
    try:
        with beating([file]):
            yield outcome
    except SystemExit:  # how submitit leaves a job that it has sent back to the queue
        outcome["requeued"] = True
        raise
    finally:
        with suppress(OSError):
            write_atomic(file, to_json(begun | outcome | {"finished": time.time()}))


def job_records(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """The records of a sweep's jobs that began after `since`."""
    found = []
    for file in sorted(folder.glob("job_*.json")):
        with suppress(OSError):
            # All that is known of a job that met a full disk: its file is empty.
            known: dict[str, Any] = {"overrides": [], "started": file.stat().st_mtime}
            found.append(known | read_json(file) | {"file": str(file)})
    return [record for record in found if float(record.get("started") or 0) >= since]
