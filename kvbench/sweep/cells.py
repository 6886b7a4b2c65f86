"""Cells: the unit of work. One method in one measure at one setting, what tells it from another, and which are done.

A cell has two names. Its `id` hashes what was asked for and can be computed anywhere, before a job is sent off. Its
`key` is the resume key: it knows the weights, the text and, for timed cells, the machine as well. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import MethodConfig
from kvbench.files import plain, read_json
from kvbench.measures.settings import Latency, Setting, context_of, one_by_one, without_context
from kvbench.report.names import rows_of
from kvbench.results import provenance
from kvbench.results.claims import is_alive
from kvbench.results.folder import STATUS, resume_key, rows_between
from kvbench.results.row import Row

TIMED = ("memory", "latency")
DONE = ("ok", "oom", "skipped")
"""What needs no second attempt: running out of memory is a result."""
RERUN = (None, "failed", "all")
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


@dataclass(frozen=True)
class Record:
    """A cell as a run folder's status.json has it."""

    run: Path
    content: dict[str, Any]
    alive: bool

    @property
    def status(self) -> str:
        """waiting | running | ok | oom | failed | interrupted | skipped | elsewhere.

        What a process had begun and not finished when it died is interrupted, whatever its file says.
        """
        stated = str(self.content.get("status"))
        return "interrupted" if stated in ("running", "waiting") and not self.alive else stated

    @property
    def finished(self) -> float:
        """Seconds since the epoch, 0 before the end."""
        return float(self.content.get("finished") or 0)


class Ledger:
    """The cells that the run folders below `results` record, read again where a status.json has changed."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._read: dict[Path, tuple[tuple[int, int, int], dict[str, Any]]] = {}

    def records(self) -> Iterator[Record]:
        """Every record of every run folder, oldest folder first."""
        for file in sorted(self.results.rglob(STATUS), key=lambda file: file.parent.name):
            if any(part.startswith(".") for part in file.relative_to(self.results).parts):
                continue
            status = self._status(file)
            cells = status.get("cells") or []
            alive = is_alive(status.get("owner"), file) if status.get("status") == "running" else False
            for content in cells:
                yield Record(file.parent, content, alive)

    def by(self, name: str) -> dict[str, list[Record]]:
        """Records by `key`, `id` or `kind`."""
        found: dict[str, list[Record]] = {}
        for record in self.records():
            found.setdefault(str(record.content.get(name)), []).append(record)
        return found

    def _status(self, file: Path) -> dict[str, Any]:
        try:
            stat = file.stat()
        except OSError:
            return {}
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if file not in self._read or self._read[file][0] != stamp:
            self._read[file] = (stamp, read_json(file))
        return self._read[file][1]


def settled(records: Iterable[Record], rerun: str | None = None, since: float = 0.0) -> Record | None:
    """The record that makes another run of its cell unnecessary, or None.

    rerun: null takes what is in DONE, `failed` only what is ok, `all` nothing; what was finished after `since`
    (seconds since the epoch: when this command began) counts in any case, so that a job that was requeued, or two
    jobs with a cell in common, run nothing twice.
    """
    best = None
    for record in records:
        enough = {None: DONE, "failed": ("ok",), "all": ()}[rerun]
        fresh = since > 0 and record.finished >= since
        counts = record.status in enough or (fresh and record.status in DONE)
        if counts and (best is None or best.status != "ok" or record.status == "ok"):
            best = record
    return best


def standing(records: Iterable[Record]) -> Record | None:
    """Of several records of a cell the one that tells where it stands: a result, else who is at it, else the last."""
    order = ("ok", "oom", "skipped", "running", "waiting", "failed", "interrupted", "elsewhere")
    ranked = sorted(records, key=lambda record: (-order.index(record.status), record.finished))
    return ranked[-1] if ranked else None


def record_rows(record: Record) -> list[Row]:
    """The rows that a cell's record names; none where its file is gone."""
    if not record.content.get("rows"):
        return []
    try:
        return rows_of(rows_between(record.run, *record.content["rows"]))
    except OSError:
        return []
