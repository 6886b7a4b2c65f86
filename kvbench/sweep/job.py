"""The cells of one job: which are left, taking them, measuring them part by part, and recording what became of them."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from kvbench.errors import EXIT_SOME_FAILED
from kvbench.measures.context import Bench, Entry, Finding
from kvbench.measures.latency.decode_times import slope
from kvbench.measures.settings import Latency
from kvbench.report.published import Published, print_published
from kvbench.report.tables import TerminalTable
from kvbench.results.claims import Claims, beating
from kvbench.results.folder import RunFolder
from kvbench.results.ledger import DONE, Ledger, Record, latest_status, record_rows, reusable_record
from kvbench.results.row import KNOBS, Row
from kvbench.results.run_files import STATUS
from kvbench.sweep.cells import Cell, Part
from kvbench.sweep.plan import Job
from kvbench.sweep.signals import Stops, Terminated, stoppable

COMPARED = ("perplexity", "needle", "tasks", "fidelity")
"""Measures that hold every method against the full cache, which therefore runs even where its own cell is done."""
APART = ("memory",)
"""Measures whose methods share nothing: each is a step of its own, so that a kill costs one of them."""

Measures = dict[str, Callable[[Bench, Any], Iterator[Finding]]]


@dataclass
class Work:
    """The parts of a job, each with one cell a method, in the order of the bench's entries.

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


def measure(work: Work, bench: Bench, folder: RunFolder, measures: Measures) -> None:
    """Measure what the folder's record lists as waiting, part by part."""
    claims = Claims(work.job.results, folder.path.name)
    with recording(folder, bench, claims) as stops:
        # Twice: what another process had the first time it may have left behind, or a slope waited for its contexts.
        for part, cells in [*work.parts, *work.parts]:
            states = {cell["id"]: cell["status"] for cell in folder.cells}
            pairs = []
            for entry, cell in zip(bench.entries, cells, strict=True):
                state = states.get(cell.id)
                if state == "waiting" or (state == "elsewhere" and not work.is_settled(cell)):
                    pairs.append((entry, cell))
            groups = [[pair] for pair in pairs] if part.measure in APART else [pairs]
            for group in groups:
                taken = _take(work, folder, claims, part, group)
                if taken and part.context is None:
                    _slopes(work, bench, folder, part, taken)
                elif taken:
                    _measure(bench, folder, part, taken, measures, stops)
                claims.release()


def _take(
    work: Work, folder: RunFolder, claims: Claims, part: Part, pairs: list[tuple[Entry, Cell]]
) -> list[tuple[Entry, Cell]]:
    """Those that are this process's to measure, claimed and marked running; the others are marked as what they are."""
    taken = []
    outcomes: dict[str, tuple[Sequence[Row], dict[str, Any]]] = {}
    for entry, cell in pairs:
        # Looked up after the claim: who finishes a cell records it before giving its claim back.
        if not claims.take(cell.key) or work.is_settled(cell):
            holder = claims.holder(cell.key)
            claims.release([cell.key])
            note = f"another process has it: {holder}" if holder else "another process measured it meanwhile"
            outcomes[cell.id] = [], {"status": "elsewhere", "note": note}
        elif (context := work.memory_ran_out(cell)) is not None:
            note = f"out of memory at context {context:,} already; skip_larger=false tries all the same"
            row = replace(entry.row, measure=part.measure, context=part.context, status="skipped", note=note)
            outcomes[cell.id] = [row], {"status": "skipped", "note": note, "finished": time.time()}
        else:
            taken.append((entry, cell))
            outcomes[cell.id] = [], {"status": "running", "started": time.time()}
    if outcomes:
        folder.update_cells(outcomes)
    return taken


def _measure(
    bench: Bench, folder: RunFolder, part: Part, taken: list[tuple[Entry, Cell]], measures: Measures, stops: Stops
) -> None:
    started, failed, traces = time.time(), len(bench.failures), len(bench.tracebacks)
    entries = [entry for entry, _ in taken]
    if part.measure in COMPARED and bench.baseline not in entries:
        entries.insert(0, bench.baseline)
    rows: dict[tuple[Any, ...], list[Row]] = {}
    samples: list[dict[str, Any]] = []
    of_part = replace(bench, entries=entries, ways={})
    for finding in measures[part.measure](of_part, part.setting):
        for row in finding.rows:
            rows.setdefault(_knobs(row), []).append(_with_remark(row, bench))
        samples += finding.samples
    now = time.time()
    outcomes: dict[str, tuple[Sequence[Row], dict[str, Any]]] = {}
    for entry, cell in taken:
        failures = [row for label, row in bench.failures[failed:] if label == entry.label]
        mine = failures[:1] or [_noted(row, of_part.ways.get(entry.label)) for row in rows.get(_knobs(entry.row), [])]
        status = mine[0].status if mine else "failed"
        outcome: dict[str, Any] = {"status": status, "finished": now, "seconds": (now - started) / len(taken)}
        if failures or not mine:
            outcome |= {
                "note": mine[0].note if mine else "it yielded no rows",
                "traceback": "\n".join(bench.tracebacks[traces:]),
            }
        outcomes[cell.id] = mine, outcome
    with stops.held_back():
        if samples:
            folder.add_samples(samples)
        if bench.kept:
            folder.add_kept(bench.kept)
            bench.kept.clear()
        folder.update_cells(outcomes)


def _with_remark(row: Row, bench: Bench) -> Row:
    """The row with what the model itself must say in its note."""
    return _noted(row, bench.loaded.remark)


def _noted(row: Row, note: str | None) -> Row:
    """The row with one thing more in its note."""
    return replace(row, note="; ".join(filter(None, (row.note, note))) or None)


def _knobs(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, knob) for knob in KNOBS)


def _slopes(work: Work, bench: Bench, folder: RunFolder, part: Part, taken: list[tuple[Entry, Cell]]) -> None:
    """The slope over contexts, from the rows on disk: some contexts may have been measured by an earlier run."""
    assert isinstance(part.setting, Latency)
    (batch,) = part.setting.batches
    by_key = work.ledger.by("key")
    outcomes: dict[str, tuple[Sequence[Row], dict[str, Any]]] = {}
    for entry, cell in taken:
        at = [known.label for known in bench.entries].index(entry.label)
        contexts = [
            cells[at]
            for other, cells in work.parts
            if isinstance(other.setting, Latency) and other.context and other.setting.batches == [batch]
        ]
        found = [latest_status(by_key.get(context.key, [])) for context in contexts]
        if any(record is None or record.status not in (*DONE, "failed") for record in found):
            outcomes[cell.id] = [], {"status": "elsewhere", "note": "not all of its contexts are measured yet"}
            continue
        medians = [
            (row.context, row.value)
            for record in found
            if record is not None and record.status == "ok"
            for row in record_rows(record)
            if row.metric == "tpot_p50_ms" and row.context and row.value is not None
        ]
        rows = [_with_remark(row, bench) for row in slope(entry, medians, batch)]
        outcome = {"status": "ok"} if rows else {"status": "skipped", "note": "fewer than two contexts were measured"}
        outcomes[cell.id] = rows, {**outcome, "finished": time.time(), "seconds": 0.0}
    folder.update_cells(outcomes)


@contextmanager
def recording(folder: RunFolder, bench: Bench, claims: Claims) -> Iterator[Stops]:
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
        folder.finish(status, error="\n".join(bench.tracebacks) or None)


def conclude(work: Work, folder: RunFolder | None, published: Published | None = None) -> int:
    """Print the table of all cells of the job, whoever measured them, and where they are; returns the exit code."""
    records = work.records()
    results = [record for record in records if record is not None and record.status in (*DONE, "failed")]
    if rows := [row for record in results for row in record_rows(record)]:
        Console().print(TerminalTable(rows))
        print_published(published, rows)
    bad = 0
    for cell, record in zip(work.cells, records, strict=True):
        status = "missing" if record is None else record.status
        if status == "ok":
            continue
        bad += 1
        note = "" if record is None else record.content.get("note") or ""
        if status in ("running", "waiting") and record is not None:
            note = f"another process is at it, in {record.run}"
        print(f"kvbench: {status}: {cell.name}{': ' if note else ''}{note}", file=sys.stderr)
    own = folder.path.resolve() if folder else None
    earlier = sorted({str(record.run) for record in results if record.run.resolve() != own})
    if folder is None:
        print(
            f"all {len(records)} cells were measured before; rerun=all measures them again, "
            "rerun=failed what ran out of memory"
        )
    elif earlier:
        print("some cells were measured before; rerun=all measures them again")
    for run in earlier:
        print(f"measured in: {run}")
    if folder is not None:
        print(f"run folder: {folder.path}")
    print(f"report:     python -m kvbench.report {shlex.quote(str(folder.path if folder else work.job.results))}")
    return EXIT_SOME_FAILED if bad else 0
