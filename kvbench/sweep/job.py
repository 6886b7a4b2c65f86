"""The cells of one job: which are left, taking them, measuring them part by part, and recording what became of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.measures.context import Journal, MethodRun, RunContext
from kvbench.results.claims import Claims, beating
from kvbench.results.folder import RunFolder
from kvbench.results.ledger import DONE, Ledger, Record, latest_status, record_rows, reusable_record
from kvbench.results.row import KNOBS, Row, is_exact, with_flags
from kvbench.results.run_files import STATUS
from kvbench.sweep.cells import Cell, Part
from kvbench.sweep.plan import Job
from kvbench.sweep.signals import Stops, Terminated, stoppable


@dataclass
class Work:
    """The parts of a job, each with one cell a method, in the order of the run's methods.

    device: the name of what measures; an out-of-memory says nothing about another device.
    """

    job: Job
    parts: list[tuple[Part, list[Cell]]]
    device: str
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.job.results)

    @property
    def cells(self) -> list[Cell]:
        return [cell for _, cells in self.parts for cell in cells]

    def left(self) -> list[Cell]:
        """The cells that no record settles."""
        by_key = self.ledger.by("key")
        return [cell for cell in self.cells if self._settled(by_key.get(cell.key, [])) is None]

    def records(self) -> list[Record | None]:
        """Where each cell stands on disk."""
        by_key = self.ledger.by("key")
        return [latest_status(by_key.get(cell.key, [])) for cell in self.cells]

    def is_settled(self, cell: Cell) -> bool:
        return self._settled(self.ledger.by("key").get(cell.key, [])) is not None

    def memory_ran_out(self, cell: Cell) -> int | None:
        """The context at which a cell of the same kind, no larger than this one, ran out of memory on this device."""
        if not self.job.skip_larger or cell.context is None:
            return None
        for record in self.ledger.by("kind").get(cell.kind, []):
            context = record.content.get("context")
            counts = self._settled([record]) is not None and record.content.get("device") == self.device
            if counts and record.status == "oom" and context is not None and context < cell.context:
                return int(context)
        return None

    def _settled(self, records: Sequence[Record]) -> Record | None:
        return reusable_record(records, self.job.rerun, self.job.since)


Outcomes = dict[str, tuple[Sequence[Row], dict[str, Any]]]
"""By cell id: its rows, and the fields to set in its record."""

Pair = tuple[MethodRun, Cell]


def measure(work: Work, context: RunContext, folder: RunFolder) -> None:
    """Measure what the folder's record lists as waiting, part by part."""
    claims = Claims(work.job.results, folder.path.name)
    with recording(folder, context, claims) as stops:
        # Twice: a process that died may have left behind what it had claimed the first time, and a summary waits for
        # its cells.
        for part, cells in [*work.parts, *work.parts]:
            for group in _groups(part, _open_pairs(work, context, folder, cells)):
                taken = _take(work, folder, claims, part, group)
                if taken and part.is_summary:
                    _summarise(work, context, folder, part, taken)
                elif taken:
                    _measure(context, folder, part, taken, stops)
                claims.release()


def _open_pairs(work: Work, context: RunContext, folder: RunFolder, cells: Sequence[Cell]) -> list[Pair]:
    """The methods whose cell still waits, or was another process's and is not settled."""
    statuses = {cell["id"]: cell["status"] for cell in folder.cells}
    pairs = zip(context.methods, cells, strict=True)
    return [
        (method, cell)
        for method, cell in pairs
        if statuses.get(cell.id) == "waiting" or (statuses.get(cell.id) == "elsewhere" and not work.is_settled(cell))
    ]


def _groups(part: Part, pairs: list[Pair]) -> list[list[Pair]]:
    """What is measured together: all methods, or each by itself where they share nothing, so that a kill costs one."""
    return [[pair] for pair in pairs] if part.measure.one_method_at_a_time else [pairs]


def _take(work: Work, folder: RunFolder, claims: Claims, part: Part, pairs: list[Pair]) -> list[Pair]:
    """The cells that this process is to measure, claimed and marked running; the others are marked as what they are."""
    taken = []
    outcomes: Outcomes = {}
    for method, cell in pairs:
        # Looked up after the claim: a process that finishes a cell records it before it releases its claim.
        if not claims.take(cell.key) or work.is_settled(cell):
            holder = claims.holder(cell.key)
            claims.release([cell.key])
            note = f"another process has it: {holder}" if holder else "another process measured it meanwhile"
            outcomes[cell.id] = [], {"status": "elsewhere", "note": note}
        elif (smaller := work.memory_ran_out(cell)) is not None:
            note = f"out of memory at context {smaller:,} already; skip_larger=false tries all the same"
            row = replace(method.row, measure=part.measure.name, context=part.context, status="skipped", note=note)
            outcomes[cell.id] = [row], {"status": "skipped", "note": note, "finished": time.time()}
        else:
            taken.append((method, cell))
            outcomes[cell.id] = [], {"status": "running", "started": time.time()}
    if outcomes:
        folder.update_cells(outcomes)
    return taken


def _measure(context: RunContext, folder: RunFolder, part: Part, taken: list[Pair], stops: Stops) -> None:
    """Run the part's measure for the taken cells and record rows, samples and what became of each cell."""
    started, journal = time.time(), Journal()
    own = [method for method, _ in taken]
    beside = part.measure.beside(own, context.methods)
    methods = [method for method in context.methods if method in own or method in beside]
    rows: dict[tuple[Any, ...], list[Row]] = {}
    samples: list[dict[str, Any]] = []
    for result in part.measure.run(replace(context, methods=methods, journal=journal)):
        for row in result.rows:
            rows.setdefault(_knobs(row), []).append(_noted(row, context.loaded.remark))
        samples += result.samples
    finished = {"finished": time.time(), "seconds": (time.time() - started) / len(taken)}
    outcomes: Outcomes = {}
    for method, cell in taken:
        mine = [_noted(row, journal.fallbacks.get(method.label)) for row in rows.get(_knobs(method.row), [])]
        outcomes[cell.id] = _outcome(method, _flagged(method, mine), journal, finished)
    context.journal.tracebacks.extend(journal.tracebacks)
    with stops.held_back():
        if samples:
            folder.add_samples(samples)
        if journal.kept:
            folder.add_kept(journal.kept)
        folder.update_cells(outcomes)


def _outcome(
    method: MethodRun, rows: list[Row], journal: Journal, finished: dict[str, float]
) -> tuple[Sequence[Row], dict[str, Any]]:
    """A cell's rows and record: its first failure, where it has one, takes the place of its rows.

    A cell whose method the measure skipped is done without rows; its record says why.
    """
    failures = [row for label, row in journal.failures if label == method.label]
    mine = failures[:1] or rows
    if not mine and method.label in journal.skipped:
        return [], {"status": "ok", "note": journal.skipped[method.label], **finished}
    record: dict[str, Any] = {"status": mine[0].status if mine else "failed", **finished}
    if failures or not mine:
        note = mine[0].note if mine else "the measure yielded no rows for this method"
        record |= {"note": note, "traceback": "\n".join(journal.tracebacks)}
    return mine, record


def _flagged(method: MethodRun, rows: list[Row]) -> list[Row]:
    """The rows, flagged where the method never evicted or quantised anything, so that they are the full cache's."""
    if is_exact(method.row):
        return rows
    idle = {_asked(row) for row in rows if row.metric == "engaged" and row.value == 0}
    return [with_flags(row, "not_engaged") if _asked(row) in idle else row for row in rows]


def _asked(row: Row) -> tuple[int | None, str | None, str | None]:
    """What the rows share that one engaged row speaks for: the context, and of questions the time and the task."""
    return row.context, row.question, None if row.question is None else row.protocol


def _noted(row: Row, note: str | None) -> Row:
    """The row with one more remark in its note."""
    return replace(row, note="; ".join(filter(None, (row.note, note))) or None)


def _knobs(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, knob) for knob in KNOBS)


def _summarise(work: Work, context: RunContext, folder: RunFolder, part: Part, taken: list[Pair]) -> None:
    """A summary over cells, from the rows on disk: an earlier run may have measured some of them."""
    by_key = work.ledger.by("key")
    labels = [method.label for method in context.methods]
    outcomes: Outcomes = {}
    for method, cell in taken:
        at = labels.index(method.label)
        parts = [cells[at] for other, cells in work.parts if not other.is_summary and _covers(part, other)]
        records = [latest_status(by_key.get(one.key, [])) for one in parts]
        if any(record is None or record.status not in (*DONE, "failed") for record in records):
            outcomes[cell.id] = [], {"status": "elsewhere", "note": "not all of its contexts are measured yet"}
            continue
        known = [row for record in records if record and record.status == "ok" for row in record_rows(record)]
        rows = [_noted(row, context.loaded.remark) for row in part.measure.summarise(method, known)]
        record = {"status": "ok"} if rows else {"status": "skipped", "note": "fewer than two contexts were measured"}
        outcomes[cell.id] = rows, {**record, "finished": time.time(), "seconds": 0.0}
    folder.update_cells(outcomes)


def _covers(summary: Part, cell: Part) -> bool:
    return cell.measure.name == summary.measure.name and summary.measure.summarises(cell.measure)


@contextmanager
def recording(folder: RunFolder, context: RunContext, claims: Claims) -> Iterator[Stops]:
    """Whatever ends the run, its folder says so and its claims are given back."""
    with stoppable() as stops, beating([folder.path / STATUS], claims):
        try:
            yield stops
        except BaseException as error:
            stopped = not isinstance(error, Exception)
            stops.ending = stopped  # a second signal, as Slurm sends to what is requeued, must not cut the end short
            status, note = ("interrupted", None) if stopped else ("failed", f"{type(error).__name__}: {error}")
            with stops.held_back(), suppress(OSError):  # on a full disk the files stay as they were
                open_cells = [cell["id"] for cell in folder.cells if cell["status"] in ("running", "waiting")]
                folder.update_cells({cell: ([], {"status": "interrupted"}) for cell in open_cells})
                folder.finish(status, error=note)
            if stopped:
                why = f" by {error}" if isinstance(error, Terminated) else ""
                print(
                    f"kvbench: interrupted{why}; what was measured is in {folder.path}, and the same command goes on "
                    "where it stopped",
                    file=sys.stderr,
                )
            raise
        finally:
            claims.release()
        states = [cell["status"] for cell in folder.cells]
        status = "failed" if "failed" in states else "oom" if {"oom", "skipped"} & set(states) else "ok"
        folder.finish(status, error="\n".join(context.journal.tracebacks) or None)
