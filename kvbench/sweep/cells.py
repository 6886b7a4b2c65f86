"""Cells: the unit of work. One method in one measure at one setting, what tells it from another, and which are done.

A cell has two names. Its `id` hashes what was asked for and can be computed anywhere, before a job is sent off. Its
`key` is the resume key: it knows the weights, the text and, for timed cells, the machine as well. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import MethodConfig
from kvbench.files import plain
from kvbench.measures.settings import Latency, Setting, context_of, one_by_one, without_context
from kvbench.results import provenance
from kvbench.results.resume_key import resume_key

TIMED = ("memory", "latency")
SHARED = ("model", "data", "seed", "kernel", "threads")
"""What all cells of a run have in common, from its config."""


@dataclass(frozen=True)
class Part:
    """One setting of a measure: the context that is measured as a whole, or (context None) the slope over them."""

    measure: str
    setting: Setting
    context: int | None


@dataclass(frozen=True)
class Cell:
    """method, knobs: for people, `h2o` and {"budget": 256, ...}. kind: the id without the context, which larger cells
    share. `key` is empty until `Facts` are known.
    """

    id: str
    kind: str
    method: str
    knobs: dict[str, Any]
    measure: str
    context: int | None
    config: dict[str, Any]
    key: str = ""

    @property
    def name(self) -> str:
        """As messages name it: `h2o budget=256 perplexity 3072`."""
        budget = f" budget={self.knobs['budget']}" if "budget" in self.knobs else ""
        return f"{self.method}{budget} {self.measure} {'slope' if self.context is None else self.context}"

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
    task_files: str = ""

    def key(self, cell: Cell) -> str:
        """The cell's resume key."""
        timed = cell.measure in TIMED
        return resume_key(
            model_revision=self.model_revision,
            config=cell.config,
            data_fingerprint=self.task_files if cell.measure == "tasks" else self.data_fingerprint,
            protocol=cell.measure,
            dtype=self.dtype,
            device_name=self.device if timed else None,
            kernel=self.kernel if timed else None,
            threads=self.threads if timed else None,
        )


def parts_of(settings: Mapping[str, Setting]) -> list[Part]:
    """The parts of all measures, in the order of measurement; the slope follows its contexts."""
    parts = []
    for measure, setting in settings.items():
        parts += [Part(measure, one, context_of(one)) for one in one_by_one(setting)]
        if isinstance(setting, Latency) and len(setting.contexts) > 1:
            parts += [
                Part(measure, replace(setting, batches=[batch], throughput=False), None) for batch in setting.batches
            ]
    return parts


def cell_of(method: MethodConfig, part: Part, common: Mapping[str, Any]) -> Cell:
    """The cell of a method in a part.

    common: the keys in SHARED, as plain values.
    """
    seeded = {"seed": common["seed"]} if part.measure == "needle" else {}  # methods carry their own
    config = {
        "method": method.effective,
        "measure": part.measure,
        "setting": asdict(part.setting),
        "load_kwargs": common["model"].get("load_kwargs"),
        "slope": part.context is None,
        **seeded,
    }
    machine = {key: common[key] for key in ("kernel", "threads")} if part.measure in TIMED else {}
    asked = {"model": common["model"], "data": common["data"], "code": _code(), **machine}
    knobs = {key: value for key, value in (method.columns | method.others).items() if value is not None}
    kind = config | {"setting": without_context(part.setting)}
    return Cell(_hash(asked | config), _hash(asked | kind), method.label, knobs, part.measure, part.context, config)


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


def _hash(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(plain(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
