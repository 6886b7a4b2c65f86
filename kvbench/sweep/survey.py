"""What became of the cells of a sweep, from kvbench's own files alone.

Works while jobs run, after the launcher was killed, and without a scheduler. Prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.files import find_files
from kvbench.results.ledger import Ledger, Record, latest_status, record_rows
from kvbench.results.loading import rows_of_runs
from kvbench.results.row import Row
from kvbench.sweep.plan_files import PLAN, is_at_work, job_records, read_plan

EXAMPLE = "python -m kvbench.status results/"


@dataclass(frozen=True)
class CellStatus:
    """A planned cell and its latest record; None where no run has recorded it."""

    planned: dict[str, Any]
    record: Record | None

    @property
    def status(self) -> str:
        """ok | oom | skipped | running | failed | interrupted | unreadable | missing."""
        known = "missing" if self.record is None else self.record.status
        return "missing" if known in ("waiting", "elsewhere") else known

    @property
    def method(self) -> str:
        return str(self.planned.get("method"))

    def name(self, knobs: Iterable[str] = ()) -> str:
        """`h2o budget=256 perplexity 3072`, with the given knobs."""
        known, context = self.planned.get("knobs") or {}, self.planned.get("context")
        values = [f"{knob}={known[knob]}" for knob in knobs if knob in known]
        return " ".join([self.method, *values, str(self.planned.get("measure")), str(context or "slope")])


@dataclass
class Survey:
    """The cells of a sweep, of a results folder or of a run folder.

    refused: one line a job whose settings could not be used. died: one line a job whose process ended before it did.
    rows_promised, rows_found: rows that the status.json files count, and those of them that can be read.
    """

    cells: list[CellStatus] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    rows_promised: int = 0
    rows_found: int = 0

    @property
    def complete(self) -> bool:
        """Whether every cell is ok."""
        return all(cell.status == "ok" for cell in self.cells)

    def counts(self) -> Counter[str]:
        """Number of cells of each status."""
        return Counter(cell.status for cell in self.cells)

    def rows(self) -> list[Row]:
        """The rows of all finished cells."""
        records = [cell.record for cell in self.cells if cell.status in ("ok", "oom", "skipped", "failed")]
        return [row for record in records if record is not None for row in record_rows(record)]

    def seconds_left(self) -> float | None:
        """Estimate from the seconds that finished cells took, divided by the number of running processes.

        None where no cell is open, or no cell is finished.
        """
        done = [cell for cell in self.cells if cell.record and cell.record.content.get("seconds")]
        open_statuses = ("running", "interrupted", "unreadable", "missing", "failed")
        left = [cell for cell in self.cells if cell.status in open_statuses]
        if not done or not left:
            return None
        total = sum(_likely_seconds(cell, done) for cell in left)
        at_work = {cell.record.run for cell in left if cell.record and cell.status == "running"}
        return total / max(1, len(at_work))


def _likely_seconds(cell: CellStatus, done: Sequence[CellStatus]) -> float:
    """Mean seconds of the most similar finished cells: of the same measure and context, of the same measure, of all."""
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
    """The cells of a sweep's folder, of a results folder with many sweeps, or of a single run folder.

    Damaged files are skipped with a warning. Raises UserError where there is neither a plan nor a run folder.
    """
    if not path.exists():
        raise UserError(f"no such folder: {str(path)!r}; give a sweep's folder or the results folder, as {EXAMPLE}")
    plans = find_files(path, PLAN)
    ledger = Ledger(path)
    runs = ledger.runs()
    if not plans and not runs:
        raise UserError(f"neither a {PLAN} nor a run folder in {str(path)!r}; give a sweep's folder, as {EXAMPLE}")
    rows = rows_of_runs(runs)
    found = Survey(rows_promised=rows.promised, rows_found=rows.found)
    own = ledger.by("id")
    seen: set[str] = set()
    for file in plans:
        plan = read_plan(file)
        root = file.parent / str(plan.get("results") or ".")
        _add_plan(found, file.parent, plan, own if _same(root, path) else Ledger(root).by("id"), seen)
    for id, records in own.items():
        if id not in seen:
            found.cells.append(CellStatus(records[-1].content, latest_status(records)))
    return found


def _add_plan(
    found: Survey, folder: Path, plan: dict[str, Any], known: dict[str, list[Record]], seen: set[str]
) -> None:
    """Add the plan's cells that are not in `seen`, and the jobs that were refused or killed. known: records by id."""
    started = float(plan.get("started") or 0)
    since = started if plan.get("rerun") == "all" else 0.0
    jobs = plan.get("jobs") or []
    records = job_records(folder, started)
    refused = {tuple(job["overrides"]): job["refused"] for job in jobs if job.get("refused")}
    refused |= {tuple(record["overrides"]): record.get("error") for record in records if record.get("code") == 2}
    found.refused += [f"{' '.join(overrides)}: {why}" for overrides, why in refused.items()]
    for record in records:
        if record.get("finished") is None and not is_at_work(record):
            owner = record.get("owner") or {}
            found.died.append(f"{' '.join(record['overrides'])} (pid {owner.get('pid')} on {owner.get('host')})")
    wanted = {cell for job in jobs if tuple(job["overrides"]) not in refused for cell in job["cells"]}
    for planned in plan.get("cells") or []:
        if planned["id"] in wanted - seen:
            seen.add(planned["id"])
            mine = [r for r in known.get(planned["id"], []) if r.status == "running" or r.finished >= since]
            found.cells.append(CellStatus(planned, latest_status(mine)))


def _same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()
