"""verify.json: what `python -m kvbench.verify` found in a run folder, and whether the folder is still the same."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.files import to_json, write_atomic
from kvbench.results.checks import is_count, is_list_of, is_object, is_text, optional, problem_of, read_object
from kvbench.results.kept_tokens import KEPT
from kvbench.results.run_files import CONFIG, METRICS, PROVENANCE, SAMPLES, STATUS

RECORD = "verify.json"
CHECKED = (CONFIG, PROVENANCE, METRICS, SAMPLES, STATUS, KEPT)
"""Files of a run folder that a record speaks of."""


@dataclass(frozen=True)
class Check:
    """One sentence that was found to be true or not. name: what was checked."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class VerifyRecord:
    """What one verification found.

    content: `content_hash` of the folder. source: hash of the source that verified. same_source: whether it is the
    source that measured. exact: whether scores were compared to the bit; differs: why not. drawn: samples measured
    again; population: samples in all. salted: whether a word that only the verifier knew took part in the draw.
    machine: the processor or GPU.
    """

    passed: bool
    content: str
    source: str
    same_source: bool
    exact: bool
    differs: list[str]
    drawn: int
    population: int
    salted: bool
    machine: str
    time_utc: str
    checks: list[Check]


_FIELDS = {
    "passed": lambda value: isinstance(value, bool),
    "content": is_text,
    "source": is_text,
    "same_source": lambda value: isinstance(value, bool),
    "exact": lambda value: isinstance(value, bool),
    "differs": is_list_of(is_text),
    "drawn": is_count,
    "population": is_count,
    "salted": lambda value: isinstance(value, bool),
    "machine": is_text,
    "time_utc": is_text,
    "checks": is_list_of(is_object),
}
_CHECK = {"name": is_text, "passed": lambda value: isinstance(value, bool), "detail": optional(is_text)}


def content_hash(run: Path) -> str:
    """sha256 of the files of a run folder that hold what was measured and how; a file that is absent counts as such."""
    digest = hashlib.sha256()
    for name in CHECKED:
        try:
            content = (run / name).read_bytes()
        except OSError:
            digest.update(f"{name} absent\0".encode())
            continue
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\0".encode())
    return digest.hexdigest()


def write_record(run: Path, record: VerifyRecord) -> Path:
    """Write verify.json into the run folder, whole or not at all; returns its path."""
    path = run / RECORD
    write_atomic(path, to_json(asdict(record)))
    return path


def read_record(run: Path) -> VerifyRecord | None:
    """The record in a run folder; None where there is none or, after a warning, it cannot be used."""
    content = read_object(run / RECORD, _problem)
    if content is None:
        return None
    checks = [Check(one["name"], one["passed"], one.get("detail") or "") for one in content["checks"]]
    return VerifyRecord(**{name: content[name] for name in _FIELDS if name != "checks"}, checks=checks)


def _problem(content: Any) -> str | None:
    wrong = problem_of(content, _FIELDS)
    return wrong or next((reason for one in content["checks"] if (reason := problem_of(one, _CHECK))), None)


def why_not_verified(run: Path) -> str | None:
    """Why a run folder does not count as verified; None where its record passes and speaks of its present content."""
    record = read_record(run)
    if record is None:
        return "not verified"
    if not record.passed:
        failed = next((check for check in record.checks if not check.passed), None)
        return "verification failed" + (f": {failed.name}: {failed.detail}" if failed else "")
    if record.content != content_hash(run):
        return "changed since it was verified"
    return None
