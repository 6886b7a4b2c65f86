"""The cells of a run folder: one piece of a measure, with the rows and samples that belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.measure import Measure
from kvbench.measures.memory import Memory
from kvbench.measures.verification import Scored, Verification
from kvbench.results.row import Row
from kvbench.verify.rebuilt import Rebuilt
from kvbench.verify.recorded import Recorded, claim_of_entry, claim_of_row, entries_of

TELLING = ("protocol", "task", "length")
"""Keys of a sample that tell its cell; versions that lack one had one cell only."""


@dataclass(frozen=True)
class CellRecord:
    """rows: each with its method. records: what the samples must say, without scores; samples: what they say."""

    measure: Measure
    verification: Verification | None
    rows: list[tuple[MethodRun, Row]]
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def name(self) -> str:
        task = f" {self.measure.task}" if self.measure.task else ""
        return f"{self.measure.name}{task} {self.measure.size}"

    @property
    def labels(self) -> list[str]:
        """The methods that have rows."""
        return list(dict.fromkeys(method.label for method, _ in self.rows))

    @property
    def is_memory(self) -> bool:
        return isinstance(self.measure, Memory)

    def methods(self, rebuilt: Rebuilt) -> list[MethodRun]:
        """The methods that the samples list, in their order."""
        found: dict[str, MethodRun] = {}
        for sample in self.samples:
            for entry in entries_of(sample):
                if (method := rebuilt.methods.get(claim_of_entry(entry))) is not None:
                    found[method.label] = method
        return list(found.values())

    def scores(self, rebuilt: Rebuilt) -> list[Scored]:
        """What each sample records of each method, by label."""
        return [
            {
                method.label: entry
                for entry in entries_of(sample)
                if (method := rebuilt.methods.get(claim_of_entry(entry))) is not None
            }
            for sample in self.samples
        ]


def cells_of(recorded: Recorded, rebuilt: Rebuilt) -> tuple[list[CellRecord], list[str]]:
    """The cells that have rows or samples; and a line for rows and samples that belong to no cell of config.yaml."""
    cells = []
    rows = [(method, row) for row in recorded.rows if (method := rebuilt.methods.get(claim_of_row(row))) is not None]
    samples = list(recorded.samples)
    for measure in rebuilt.measures:
        pieces = measure.cells()
        for cell in pieces:
            verification = cell.verification()
            mine = [(method, row) for method, row in rows if _is_of(row, cell, verification, alone=len(pieces) == 1)]
            rows = [pair for pair in rows if not any(pair[1] is row for _, row in mine)]
            records = verification.records(rebuilt.context) if verification is not None else []
            own = [sample for sample in samples if records and _lists(records[0], sample)]
            samples = [sample for sample in samples if not any(sample is one for one in own)]
            if mine or own:
                cells.append(CellRecord(cell, verification, mine, records, own))
    verified = {measure.name for measure in rebuilt.measures if measure.cells()[0].verification() is not None}
    stray_rows = [row for _, row in rows if row.measure in verified]
    stray_samples = [sample for sample in samples if sample.get("measure") in verified]
    known = {measure.name for measure in rebuilt.measures}
    unknown = sorted({str(row.measure) for _, row in rows if row.measure not in known})
    lines = [f"rows of {name}, which config.yaml does not measure" for name in unknown]
    lines += [f"{len(stray_rows)} rows belong to no setting of config.yaml"] if stray_rows else []
    lines += [f"{len(stray_samples)} samples belong to no setting of config.yaml"] if stray_samples else []
    return cells, lines


def _is_of(row: Row, cell: Measure, verification: Verification | None, alone: bool) -> bool:
    if row.measure != cell.name:
        return False
    if verification is None:
        return row.context == cell.size or (alone and row.context is None)
    return all(getattr(row, name) in (None, value) for name, value in verification.columns.items())


def _lists(record: dict[str, Any], sample: dict[str, Any]) -> bool:
    return sample.get("measure") == record["measure"] and all(
        sample.get(key) in (None, record[key]) for key in TELLING if key in record
    )


def with_methods(context: RunContext, methods: Sequence[MethodRun]) -> RunContext:
    """The context for these methods, the full cache first, in the order of the run."""
    wanted = {method.label for method in methods}
    chosen = [one for one in context.methods if one.label in wanted or one is context.baseline]
    return replace(context, methods=chosen, journal=type(context.journal)())
