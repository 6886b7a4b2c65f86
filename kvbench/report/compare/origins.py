"""Which code, machine and day the rows of a table come from, and a sentence where a table mixes several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.report.compare.comparison import Line
from kvbench.report.compare.names import name_list
from kvbench.results.run_files import read_metrics, read_provenance

MOST_NAMES = 3


@dataclass(frozen=True)
class Origin:
    """Of one run. source: first digits of the hash of the code. machine: processor and GPUs. day: as 2026-11-30."""

    source: str
    machine: str
    day: str


Origins = Mapping[str, Origin]
"""By the name of the run, as rows carry it."""


def origins_of(runs: Iterable[Path]) -> dict[str, Origin]:
    """The origin of each run folder with a provenance.json, under the folder's name and under its rows' name of it."""
    found: dict[str, Origin] = {}
    for run in runs:
        if (origin := origin_of(read_provenance(run))) is None:
            continue
        metrics = read_metrics(run)  # published folders are renamed, their rows are not
        names = [] if metrics is None else metrics["run"].unique().to_pylist()
        found |= dict.fromkeys([run.name, *filter(None, names)], origin)
    return found


def origin_of(provenance: Mapping[str, Any]) -> Origin | None:
    """From the content of a provenance.json; None where nothing is recorded."""
    if not provenance:
        return None
    cpu, gpus = provenance.get("cpu"), provenance.get("gpus")
    parts = [cpu, *(gpus if isinstance(gpus, Sequence) else [])]
    names = [str(part["name"]) for part in parts if isinstance(part, Mapping) and part.get("name")]
    return Origin(
        source=str(provenance.get("source_hash") or "unknown")[:8],
        machine=" + ".join(names) or "unknown",
        day=str(provenance.get("time_utc") or "unknown")[:10],
    )


def runs_of(lines: Iterable[Line]) -> list[str]:
    """Names of the runs that measured the lines, sorted."""
    return sorted({row.run for line in lines for row in line.cells.values() if row.run is not None})


def mixed_origins(lines: Iterable[Line], origins: Origins) -> list[str]:
    """The caption part of a table whose rows come from several versions of the code, machines or days; else empty."""
    known = [origins[run] for run in runs_of(lines) if run in origins]
    parts = [
        f"{len(values)} {words} ({name_list(values, MOST_NAMES)})"
        for words, values in (
            ("versions of the code", sorted({one.source for one in known})),
            ("machines", sorted({one.machine for one in known})),
            ("days", sorted({one.day for one in known})),
        )
        if len(values) > 1
    ]
    if not parts:
        return []
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return [f"measured with {listed}: a difference between lines may come from these"]
