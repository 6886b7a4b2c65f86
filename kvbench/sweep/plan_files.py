"""The folder of a sweep: its plan and the record of each of its jobs, written and read.

The folder lies in the results folder and is named after what the sweep asks for, so that the same command finds it
again. It holds `plan.json` (written before anything is launched), one `job_<hash>.json` a job, the run folders, and
`launcher/` with what the launcher writes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.files import to_json, write_atomic
from kvbench.results.checks import is_list_of, is_name, is_number, is_object, is_text, optional, problem_of, read_object
from kvbench.results.claims import beating, is_alive, this_process

PLAN, LAUNCHER = "plan.json", "launcher"

_PLAN = {
    "started": optional(is_number),
    "rerun": optional(is_text),
    "results": optional(is_text),
    "jobs": optional(is_list_of(is_object)),
    "cells": optional(is_list_of(is_object)),
}
_PLANNED_JOB = {"overrides": is_list_of(is_text), "cells": is_list_of(is_text), "refused": optional(is_text)}
_PLANNED_CELL = {
    "id": is_name,
    "method": optional(is_name),
    "measure": optional(is_name),
    "knobs": optional(is_object),
    "context": optional(is_number),
}
_JOB = {
    "overrides": optional(is_list_of(is_text)),
    "owner": optional(is_object),
    "started": optional(is_number),
    "finished": optional(is_number),
    "code": optional(is_number),
    "error": optional(is_text),
}


@dataclass(frozen=True)
class Sweep:
    """A planned sweep: its folder, when its command began (seconds since the epoch), and the command."""

    folder: Path
    started: float
    command: list[str]

    def job_file(self, overrides: Sequence[str]) -> Path:
        return self.folder / f"job_{short_hash(overrides)}.json"


def read_plan(file: Path) -> dict[str, Any]:
    """A plan.json; {} if there is none or it cannot be used."""
    return read_object(file, _plan_problem) or {}


def _plan_problem(plan: Mapping[str, Any]) -> str | None:
    if wrong := problem_of(plan, _PLAN):
        return wrong
    parts = [("jobs", job, _PLANNED_JOB) for job in plan.get("jobs") or []]
    parts += [("cells", cell, _PLANNED_CELL) for cell in plan.get("cells") or []]
    return next((f"in {name} {wrong}" for name, part, fields in parts if (wrong := problem_of(part, fields))), None)


@contextmanager
def job_record(sweep: Sweep | None, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Record a job of a sweep in its own file: the block sets `code`, its exit code, and `error` where it has one.

    The file is touched while the block runs, so that other machines see that the process runs.
    """
    outcome: dict[str, Any] = {"code": None, "error": None}
    if sweep is None:
        yield outcome
        return
    begun = {"overrides": list(overrides), "owner": this_process(), "started": time.time()}
    file = sweep.job_file(overrides)
    with suppress(OSError):  # on a full disk; the cells report that
        file.touch()  # an empty file needs no room and shows that the job has begun
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
    """The records of a sweep's jobs that began after `since`, each with the path of its file as `file`.

    A job that met a full disk leaves an empty file, of which only the date is known.
    """
    found = []
    for file in sorted(folder.glob("job_*.json")):
        with suppress(OSError):
            stat = file.stat()
            content = (read_object(file, lambda content: problem_of(content, _JOB)) or {}) if stat.st_size else {}
            known: dict[str, Any] = {"overrides": [], "started": stat.st_mtime}
            found.append(known | content | {"file": str(file)})
    return [record for record in found if float(record.get("started") or 0) >= since]


def is_at_work(record: Mapping[str, Any]) -> bool:
    """Whether the process of a job has not finished it and runs."""
    return record.get("finished") is None and is_alive(record.get("owner"), Path(record["file"]))


def short_hash(words: Sequence[str]) -> str:
    """8 hex digits that do not depend on the order of the words."""
    return hashlib.sha256("\0".join(sorted(words)).encode()).hexdigest()[:8]
