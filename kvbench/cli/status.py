"""`python -m kvbench.status PATH`: how many cells of a sweep are done, running, failed, missing, and the time left."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError
from kvbench.sweep.survey import EXAMPLE, CellStatus, Survey, survey

ORDER = ("ok", "oom", "skipped", "running", "failed", "interrupted", "unreadable", "missing")
WORDS = {"ok": "done", "oom": "out of memory"}
MOST_LINES = 20


def describe(found: Survey) -> str:
    """The survey as text: one line of counts, then each cell that is not done, and each job that could not run."""
    counts = found.counts()
    told = [f"{counts[status]} {WORDS.get(status, status)}" for status in ORDER if counts[status]]
    left = found.seconds_left()
    ending = f"; about {duration(left)} left" if left is not None else ""
    lines = [f"{len(found.cells)} cells: {', '.join(told) or 'none'}{ending}"]
    varying = _varying(found.cells)
    for status in ORDER[1:]:
        some = [cell for cell in found.cells if cell.status == status]
        names = [cell.name(varying[cell.method]) for cell in some[:MOST_LINES]]
        lines += [f"  {status:<12} {name}{_detail(cell)}" for name, cell in zip(names, some, strict=False)]
        if len(some) > MOST_LINES:
            lines.append(f"  ... and {len(some) - MOST_LINES} more {status}")
    lines += [f"  refused      {line}" for line in found.refused]
    lines += [f"  job died     {line}" for line in found.died]
    if found.rows_found != found.rows_promised:
        lines.append(
            f"rows: {found.rows_found:,} found of {found.rows_promised:,} that the status.json files count; the others "
            "were in a metrics.parquet that is lost or damaged"
        )
    if {"failed", "interrupted", "unreadable", "missing"} & set(counts):
        lines.append("The same command again measures what is not done.")
    return "\n".join(lines)


def _varying(cells: Sequence[CellStatus]) -> dict[str, list[str]]:
    """For each method the knobs that differ between its cells."""
    values: dict[str, dict[str, set[str]]] = {}
    for cell in cells:
        for knob, value in (cell.planned.get("knobs") or {}).items():
            values.setdefault(cell.method, {}).setdefault(knob, set()).add(str(value))
    return {
        cell.method: [knob for knob, found in values.get(cell.method, {}).items() if len(found) > 1] for cell in cells
    }


def _detail(cell: CellStatus) -> str:
    if cell.record is None:
        return ""
    content = cell.record.content
    if cell.status == "running":
        owner = cell.record.files.status.get("owner") or {}
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
    """Print the survey; 0 if every cell is ok, 3 if not, 2 after one line if there is no sweep and no run folder."""
    parser = _Parser(
        prog="python -m kvbench.status",
        description="Print how many cells of a sweep are done, running, failed and missing, and the time left.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a sweep's folder, a results folder, or a run folder")
    try:
        found = survey(parser.parse_args(arguments).path)
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(describe(found))
    return 0 if found.complete and not found.refused else EXIT_SOME_FAILED
