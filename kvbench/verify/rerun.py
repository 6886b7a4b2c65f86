"""Measure the drawn samples again, in the batches in which they ran, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.measures.context import RunContext
from kvbench.measures.memory import Memory
from kvbench.measures.verification import Remeasured
from kvbench.results.row import Row
from kvbench.results.verification import Check
from kvbench.verify.cells import CellRecord, with_methods
from kvbench.verify.checks import check_of
from kvbench.verify.draw import Unit
from kvbench.verify.rebuilt import Rebuilt
from kvbench.verify.tolerance import Tolerance

OF_PROCESS = ("peak_", "allocator_bytes")
"""Memory metrics that depend on the process, so that they are not compared."""
COUNTED = 1e-9
"""Relative difference of counts and bytes that rounding of a mean explains."""


@dataclass
class Compared:
    """scores: comparisons of one score of one sample. largest: by name the largest difference. counts: comparisons of
    tokens and bytes. wrong: one line for each that is not as recorded."""

    scores: int = 0
    counts: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def check(self, exact: bool) -> Check:
        """What came of it, as a check."""
        if self.wrong:
            return check_of("rerun", self.wrong, "")
        if not self.scores + self.counts:
            return Check("rerun", True, "nothing in this folder can be measured again")
        worst = ", ".join(f"{name} {value:.1g}" for name, value in self.largest.items())
        how = "equal to the bit" if exact else f"within the tolerance; largest differences: {worst or 'none'}"
        return Check("rerun", True, f"{self.scores} scores {how}; {self.counts} rows of bytes and tokens are equal")


def units_of(cells: Sequence[CellRecord]) -> list[Unit]:
    """What can be measured again: each method that has rows, on each sample; of memory each cell's method."""
    units = []
    for index, cell in enumerate(cells):
        samples = 1 if cell.is_memory else len(cell.samples) if cell.verification is not None else 0
        units += [Unit(index, sample, label) for sample in range(samples) for label in cell.labels]
    return units


def compare(units: Sequence[Unit], cells: Sequence[CellRecord], rebuilt: Rebuilt, tolerance: Tolerance) -> Compared:
    """Measure what was drawn again; the other samples of each batch are compared as well."""
    found = Compared()
    for index, cell in enumerate(cells):
        mine = [unit for unit in units if unit.cell == index]
        if mine and cell.is_memory:
            _memory(cell, {unit.label for unit in mine}, rebuilt, found)
        elif mine:
            _samples(cell, mine, rebuilt, tolerance, found)
    return found


def _samples(cell: CellRecord, units: Sequence[Unit], rebuilt: Rebuilt, tolerance: Tolerance, found: Compared) -> None:
    assert cell.verification is not None
    recorded, held = cell.scores(rebuilt), list[Remeasured]()
    for numbers in cell.verification.batches(rebuilt.context):
        labels = {unit.label for unit in units if unit.sample in numbers}
        if not labels:
            continue
        again = _again(cell, numbers, labels, rebuilt, found)
        held.append(again)
        for number, by_label in again.scores.items():
            if number >= len(recorded):
                continue  # a sample that is not recorded: `samples_check` has said so
            for label, scores in by_label.items():
                _scores(
                    f"{cell.name}, {cell.verification.unit} {number}, {label}",
                    recorded[number].get(label),
                    scores,
                    tolerance,
                    found,
                )
    for label in dict.fromkeys(label for again in held for label in again.held):
        _held(cell, label, [again.held[label] for again in held if label in again.held], rebuilt, found)


def _again(cell: CellRecord, numbers: Sequence[int], labels: set[str], rebuilt: Rebuilt, found: Compared) -> Remeasured:
    assert cell.verification is not None
    context = with_methods(rebuilt.context, [one for one in rebuilt.context.methods if one.label in labels])
    again = cell.verification.again(context, numbers)
    found.wrong += [f"{cell.name}, {label}: {row.status}: {row.note}" for label, row in context.journal.failures]
    return again


def _scores(
    where: str, recorded: Mapping[str, Any] | None, scores: Mapping[str, Any], tolerance: Tolerance, found: Compared
) -> None:
    for name, value in scores.items():
        if recorded is None or name not in recorded:  # versions before recorded fewer scores; the full cache's may be
            continue  # in another folder
        found.scores += 1
        old = recorded[name]
        if isinstance(old, int | float) and isinstance(value, int | float):
            found.largest[name] = max(found.largest.get(name, 0.0), abs(value - old))
        if not tolerance.accepts(name, old, value):
            found.wrong.append(f"{where}: {name} is {value!r}, recorded {old!r}")


def _held(
    cell: CellRecord, label: str, batches: Sequence[Mapping[str, float]], rebuilt: Rebuilt, found: Compared
) -> None:
    """Compare what the caches held with the rows. Rows are means over all batches: where those measured again are not
    enough, the others are measured too before a row counts as wrong."""
    rows = [row for method, row in cell.rows if method.label == label and row.metric in batches[0]]
    found.counts += len(rows)
    if all(_same(row, batches) for row in rows):
        return
    everything = [again.held[label] for again in _every_batch(cell, label, rebuilt, found) if label in again.held]
    found.wrong += [
        f"{cell.name}, {label}: {row.metric} is {_mean(row, everything):,.10g}, recorded {row.value:,.10g}"
        for row in rows
        if not _same(row, everything)
    ]


def _every_batch(cell: CellRecord, label: str, rebuilt: Rebuilt, found: Compared) -> Iterator[Remeasured]:
    assert cell.verification is not None
    for numbers in cell.verification.batches(rebuilt.context):
        yield _again(cell, numbers, {label}, rebuilt, found)


def _mean(row: Row, batches: Sequence[Mapping[str, float]]) -> float:
    return sum(batch[str(row.metric)] for batch in batches) / len(batches)


def _same(row: Row, batches: Sequence[Mapping[str, float]]) -> bool:
    found = _mean(row, batches)
    return row.value is not None and abs(found - row.value) <= COUNTED * max(abs(found), 1.0)


def _memory(cell: CellRecord, labels: set[str], rebuilt: Rebuilt, found: Compared) -> None:
    """Bytes of a memory cell, in this process: only peaks depend on the process."""
    assert isinstance(cell.measure, Memory)
    for method in rebuilt.context.methods:
        if method.label not in labels:
            continue
        context: RunContext = replace(rebuilt.context, methods=[method], journal=type(rebuilt.context.journal)())
        rows = [row for result in replace(cell.measure, isolate=False).run(context) for row in result.rows]
        now = {row.metric: row.value for row in rows if not (row.metric or "").startswith(OF_PROCESS)}
        found.wrong += [f"{cell.name}, {label}: {row.status}: {row.note}" for label, row in context.journal.failures]
        for owner, row in cell.rows:
            if owner is method and row.metric in now:
                found.counts += 1
                if not _same(row, [{str(row.metric): now[row.metric] or 0.0}]):
                    found.wrong.append(
                        f"{cell.name}, {method.label}: {row.metric} is {now[row.metric]:,.10g}, recorded {row.value}"
                    )
