"""The whole of a verification: the checks in their order, the draw, the samples measured again, the record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from kvbench.cache.attention import kvbench_attention
from kvbench.config import ConfigSources
from kvbench.errors import UserError
from kvbench.files import writing_to
from kvbench.progress import Progress
from kvbench.results.provenance import source_hash
from kvbench.results.verification import Check, VerifyRecord, content_hash, write_record
from kvbench.verify.cells import CellRecord, cells_of
from kvbench.verify.checks import arithmetic_check, rows_check, samples_check, settings_check
from kvbench.verify.draw import drawn
from kvbench.verify.rebuilt import rebuild
from kvbench.verify.recorded import Recorded
from kvbench.verify.rerun import compare, units_of
from kvbench.verify.tolerance import tolerance_for


def verify(recorded: Recorded, samples: int, salt: str, sources: ConfigSources) -> VerifyRecord:
    """Check a run folder, print each check as it is made, and write verify.json into the folder.

    samples: how many are measured again. salt: a word that takes part in the draw. Raises UserError where the model,
    the text or a measure of the folder is not here, and where the folder changes meanwhile.
    """
    checks: list[Check] = []

    def say(check: Check) -> None:
        print(f"{'pass' if check.passed else 'FAIL'}  {check.name:<10} {check.detail}", flush=True)
        checks.append(check)

    rebuilt = rebuild(recorded, sources, Progress())
    tolerance = tolerance_for(recorded, rebuilt)
    cells, stray = cells_of(recorded, rebuilt)
    say(settings_check(recorded, rebuilt, tolerance))
    say(samples_check(cells, stray))
    say(rows_check(cells, rebuilt, tolerance))
    say(arithmetic_check(cells, rebuilt, tolerance))
    units = units_of(cells)
    chosen = drawn(units, samples, recorded.content, source_hash(), salt)
    with kvbench_attention(rebuilt.context.loaded.model):
        again = compare(chosen, cells, rebuilt, tolerance)
    say(again.check(tolerance.exact))
    for line in (*tolerance.notes(), *not_measured_again(cells)):
        print(f"note  {line}")
    if content_hash(recorded.run) != recorded.content:
        raise UserError(f"{str(recorded.run)!r} changed while it was verified; type the same command again")
    record = VerifyRecord(
        passed=all(check.passed for check in checks),
        content=recorded.content,
        source=source_hash(),
        same_source=tolerance.same_source,
        exact=tolerance.exact,
        differs=tolerance.differs,
        drawn=len(chosen),
        population=len(units),
        salted=bool(salt),
        machine=str(rebuilt.context.baseline.row.device),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        checks=checks,
    )
    with writing_to(recorded.run, "run folder"):
        write_record(recorded.run, record)
    return record


def not_measured_again(cells: Sequence[CellRecord]) -> list[str]:
    """One line for each measure of which nothing can be measured again."""
    counts: dict[str, int] = {}
    for cell in cells:
        if cell.verification is None and not cell.is_memory:
            counts[cell.measure.name] = counts.get(cell.measure.name, 0) + len(cell.rows)
    return [
        f"{name}: {count} rows cannot be measured again"
        + (": times belong to the machine and the hour; their arithmetic was checked" if name == "latency" else "")
        for name, count in counts.items()
    ]
