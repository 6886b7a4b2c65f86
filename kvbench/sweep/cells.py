"""Cells: the unit of work. One method in one piece of a measure, and the two names that tell a cell from another.

A cell's `id` hashes what was asked for and can be computed anywhere, before a job is sent off. Its `key` is the resume
key: it also holds the weights, the text and, for timed measures, the machine. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import MethodConfig
from kvbench.files import plain
from kvbench.measures.measure import Measure
from kvbench.results import provenance
from kvbench.results.resume_key import resume_key

SHARED = ("model", "data", "seed", "kernel", "threads")
"""What all cells of a run have in common, from its config."""


@dataclass(frozen=True)
class Part:
    """A piece of a measure: a cell of every method, or a summary computed from the rows of other cells."""

    measure: Measure
    is_summary: bool = False

    @property
    def context(self) -> int | None:
        """Tokens of the prompt; None for a summary."""
        return None if self.is_summary else self.measure.size


@dataclass(frozen=True)
class Cell:
    """One method in one part.

    method, knobs: for people, `h2o` and {"budget": 256, ...}. kind: the id without the sizes, which larger cells share.
    """

    id: str
    kind: str
    method: str
    knobs: dict[str, Any]
    part: Part
    config: dict[str, Any]
    key: str = ""

    @property
    def measure(self) -> str:
        """Name of the measure."""
        return self.part.measure.name

    @property
    def context(self) -> int | None:
        """Tokens of the prompt; None for a summary."""
        return self.part.context

    @property
    def name(self) -> str:
        """As messages name it: `h2o budget=256 perplexity 3072`, `h2o budget=256 needle vt 1024`."""
        budget = f" budget={self.knobs['budget']}" if "budget" in self.knobs else ""
        task = f" {self.part.measure.task}" if self.part.measure.task else ""
        return f"{self.method}{budget} {self.measure}{task} {'slope' if self.context is None else self.context}"

    def record(self) -> dict[str, Any]:
        """What a status.json or a plan keeps of it."""
        return {
            "id": self.id,
            "kind": self.kind,
            "key": self.key,
            "method": self.method,
            "knobs": self.knobs,
            "measure": self.measure,
            "context": self.context,
        }


@dataclass(frozen=True)
class Facts:
    """What only the machine that measures knows."""

    model_revision: str
    data_fingerprint: str
    dtype: str
    device: str
    kernel: str
    threads: int

    def key(self, cell: Cell) -> str:
        """The cell's resume key."""
        measure = cell.part.measure
        return resume_key(
            model_revision=self.model_revision,
            config=cell.config,
            data_fingerprint=measure.data_fingerprint(self.data_fingerprint),
            protocol=measure.name,
            dtype=self.dtype,
            device_name=self.device if measure.is_timed else None,
            kernel=self.kernel if measure.is_timed else None,
            threads=self.threads if measure.is_timed else None,
        )


def parts_of(measures: Sequence[Measure]) -> list[Part]:
    """The parts of all measures, in the order of measurement; summaries follow their cells."""
    parts = []
    for measure in measures:
        parts += [Part(cell) for cell in measure.cells()]
        parts += [Part(summary, is_summary=True) for summary in measure.summaries()]
    return parts


def cell_of(method: MethodConfig, part: Part, common: Mapping[str, Any]) -> Cell:
    """The cell of a method in a part.

    common: the keys in SHARED, as plain values.
    """
    measure = part.measure
    config = {
        "method": method.effective,
        "measure": measure.name,
        "setting": measure.settings(),
        "load_kwargs": common["model"].get("load_kwargs"),
        "summary": part.is_summary,
        **({"seed": common["seed"]} if measure.draws else {}),  # methods carry their own
        **({"outside": outside} if (outside := _outside_code(method, measure)) else {}),
    }
    machine = {key: common[key] for key in ("kernel", "threads")} if measure.is_timed else {}
    asked = {"model": common["model"], "data": common["data"], "code": _code(), **machine}
    knobs = {key: value for key, value in (method.columns | method.others).items() if value is not None}
    kind = config | {"setting": measure.kind()}
    return Cell(_hash(asked | config), _hash(asked | kind), method.label, knobs, part, config)


def common_of(config: DictConfig) -> dict[str, Any]:
    """The keys in SHARED of a resolved config, as plain values."""
    return {
        key: OmegaConf.to_object(config[key]) if OmegaConf.is_config(config[key]) else config[key] for key in SHARED
    }


def with_key(cell: Cell, facts: Facts) -> Cell:
    return replace(cell, key=facts.key(cell))


@cache
def _code() -> list[str | None]:
    versions = [provenance.package_version(name) for name in ("torch", "transformers")]
    return [provenance.source_hash(), *versions]


def _outside_code(method: MethodConfig, measure: Measure) -> list[str]:
    """Hashes of the modules that a method's or measure's classes come from, where those are not part of kvbench."""
    nodes = [method.rule, method.slots, method.rule.get("inner"), method.slots.get("inner")]
    targets = {str(node["_target_"]).rpartition(".")[0] for node in nodes if node and "_target_" in node}
    modules = sorted(module for module in {*targets, type(measure).__module__} if module.split(".")[0] != "kvbench")
    return [f"{module} {_module_hash(module)}" for module in modules]


@cache
def _module_hash(module: str) -> str:
    try:
        found = find_spec(module)
        return hashlib.sha256(Path(str(found.origin)).read_bytes()).hexdigest()[:16] if found else "missing"
    except (ImportError, OSError, ValueError):
        return "unreadable"


def _hash(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(plain(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
