"""`python -m kvbench.status PATH`: what is done, running, failed and missing, and the time left.

Rests on kvbench's own files alone, so it works while jobs run, after the launcher died, and without any scheduler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError
from kvbench.files import read_json
from kvbench.results.claims import is_alive
from kvbench.results.folder import STATUS
from kvbench.results.ledger import Ledger, Record, record_rows, standing
from kvbench.results.row import Row
from kvbench.sweep.plan import PLAN, job_records

EXAMPLE = "python -m kvbench.status results/"
MOST_LINES = 20


@dataclass(frozen=True)
class Standing:
    """A planned cell and where it stands; `record` is None where nothing has been heard of it."""

    planned: dict[str, Any]
    record: Record | None

    @property
    def status(self) -> str:
        """ok | oom | skipped | running | failed | interrupted | missing."""
        known = "missing" if self.record is None else self.record.status
        return "missing" if known in ("waiting", "elsewhere") else known

    @property
    def method(self) -> str:
        return str(self.planned.get("method"))

    def name(self, told: Iterable[str] = ()) -> str:
        """`h2o budget=256 perplexity 3072`, with the knobs in `told`."""
        knobs, context = self.planned.get("knobs") or {}, self.planned.get("context")
        values = [f"{knob}={knobs[knob]}" for knob in told if knob in knobs]
        return " ".join([self.method, *values, str(self.planned.get("measure")), str(context or "slope")])


@dataclass
class Survey:
    """Everything known about the cells at some place. refused, died: one line a job that could not do its work."""

    cells: list[Standing] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every cell is ok."""
        return all(cell.status == "ok" for cell in self.cells)

    def counts(self) -> Counter[str]:
        return Counter(cell.status for cell in self.cells)

    def rows(self) -> list[Row]:
        """The rows of all cells that came to a result."""
        records = [cell.record for cell in self.cells if cell.status in ("ok", "oom", "skipped", "failed")]
        return [row for record in records if record is not None for row in record_rows(record)]

    def seconds_left(self) -> float | None:
        """From the durations of what is done: each open cell takes as long as its like did, spread over the processes
        that are at work. None where nothing open, or nothing done to judge by."""
        done = [cell for cell in self.cells if cell.record and cell.record.content.get("seconds")]
        left = [cell for cell in self.cells if cell.status in ("running", "interrupted", "missing", "failed")]
        if not done or not left:
            return None
        total = sum(_likely_seconds(cell, done) for cell in left)
        at_work = {cell.record.run for cell in left if cell.record and cell.status == "running"}
        return total / max(1, len(at_work))


def _likely_seconds(cell: Standing, done: Sequence[Standing]) -> float:
    """Mean duration of the done cells most like this one: of its measure and context, of its measure, of any."""
    for keys in (("measure", "context"), ("measure",), ()):
        known = [
            float(other.record.content["seconds"])
            for other in done
            if other.record and all(other.planned.get(key) == cell.planned.get(key) for key in keys)
        ]
        if known:
            return sum(known) / len(known)
    return 0.0


def survey(path: Path) -> Survey:
    """The cells of a sweep's folder, of a results folder with many, or of a single run folder.

    Raises UserError where there is nothing of the kind.
    """
    if not path.exists():
        raise UserError(f"no such folder: {str(path)!r}; give a sweep's folder or the results folder, as {EXAMPLE}")
    plans = sorted(file for file in path.rglob(PLAN) if not _hidden(file, path))
    own = Ledger(path).by("id")
    if not plans and not any(not _hidden(file, path) for file in path.rglob(STATUS)):
        raise UserError(f"neither a {PLAN} nor a run folder in {str(path)!r}; give a sweep's folder, as {EXAMPLE}")
    found = Survey()
    seen: set[str] = set()
    for file in plans:
        plan = read_json(file)
        root = file.parent / str(plan.get("results") or ".")
        _add_plan(found, file.parent, plan, own if _same(root, path) else Ledger(root).by("id"), seen)
    for id, records in own.items():
        if id not in seen and id != "None":
            record = standing(records)
            found.cells.append(Standing(records[-1].content, record))
    return found


def _add_plan(
    found: Survey, folder: Path, plan: dict[str, Any], known: dict[str, list[Record]], seen: set[str]
) -> None:
    """Add the plan's cells that are not in `seen` yet, and what is known of its jobs. known: records by id."""
    since = float(plan.get("started") or 0) if plan.get("rerun") == "all" else 0.0
    jobs = plan.get("jobs") or []
    records = job_records(folder, float(plan.get("started") or 0))
    refused = {tuple(job["overrides"]): job["refused"] for job in jobs if job.get("refused")}
    refused |= {tuple(record["overrides"]): record.get("error") for record in records if record.get("code") == 2}
    found.refused += [f"{' '.join(overrides)}: {why}" for overrides, why in refused.items()]
    for record in records:
        if record.get("finished") is None and not is_alive(record.get("owner"), Path(record["file"])):
            owner = record.get("owner") or {}
            found.died.append(f"{' '.join(record['overrides'])} (pid {owner.get('pid')} on {owner.get('host')})")
    wanted = {cell for job in jobs if tuple(job["overrides"]) not in refused for cell in job["cells"]}
    for planned in plan.get("cells") or []:
        if planned["id"] in wanted - seen:
            seen.add(planned["id"])
            mine = [r for r in known.get(planned["id"], []) if r.status == "running" or r.finished >= since]
            found.cells.append(Standing(planned, standing(mine)))


def _same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def describe(found: Survey) -> str:
    """The survey for people: one line of counts, then what is not simply done."""
    counts = found.counts()
    order = ("ok", "oom", "skipped", "running", "failed", "interrupted", "missing")
    words = {"ok": "done", "oom": "out of memory"}
    told = [f"{counts[status]} {words.get(status, status)}" for status in order if counts[status]]
    left = found.seconds_left()
    ending = f"; about {duration(left)} left" if left is not None else ""
    lines = [f"{len(found.cells)} cells: {', '.join(told) or 'none'}{ending}"]
    varying = _varying(found.cells)
    for status in order[1:]:
        some = [cell for cell in found.cells if cell.status == status]
        names = [cell.name(varying[cell.method]) for cell in some[:MOST_LINES]]
        lines += [f"  {status:<12} {name}{_detail(cell)}" for name, cell in zip(names, some, strict=False)]
        if len(some) > MOST_LINES:
            lines.append(f"  ... and {len(some) - MOST_LINES} more {status}")
    lines += [f"  refused      {line}" for line in found.refused]
    lines += [f"  job died     {line}" for line in found.died]
    if {"failed", "interrupted", "missing"} & set(counts):
        lines.append("The same command again measures what is not done.")
    return "\n".join(lines)


def _varying(cells: Sequence[Standing]) -> dict[str, list[str]]:
    """For each method the knobs that tell its cells apart."""
    values: dict[str, dict[str, set[str]]] = {}
    for cell in cells:
        for knob, value in (cell.planned.get("knobs") or {}).items():
            values.setdefault(cell.method, {}).setdefault(knob, set()).add(str(value))
    return {
        cell.method: [knob for knob, found in values.get(cell.method, {}).items() if len(found) > 1] for cell in cells
    }


def _detail(cell: Standing) -> str:
    if cell.record is None:
        return ""
    content = cell.record.content
    if cell.status == "running":
        owner = read_json(cell.record.run / STATUS).get("owner") or {}
        since = duration(max(0.0, time.time() - float(content.get("started") or time.time())))
        return f"  (for {since}, pid {owner.get('pid')} on {owner.get('host')})"
    note = content.get("note")
    return f"  ({' '.join(str(note).split())[:160]})" if note and cell.status != "missing" else ""


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; type for example: {EXAMPLE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survey; 0 if every cell is ok, 3 if not, 2 after one line if there is nothing to survey."""
    parser = _Parser(
        prog="python -m kvbench.status",
        description="What of a sweep is done, running, failed and missing, and about how long the rest will take.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a sweep's folder, a results folder, or a run folder")
    try:
        found = survey(parser.parse_args(arguments).path)
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(describe(found))
    return 0 if found.complete and not found.refused else EXIT_SOME_FAILED
