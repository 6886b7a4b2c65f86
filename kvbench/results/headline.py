"""How a measure's main numbers are shown: plain data that each measure declares and each run folder records.

The terminal and the report draw the table of any measure from this data, also for measures defined outside kvbench.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Format = Literal["fixed2", "significant", "percent", "signed", "small", "count", "bytes", "ms", "ms_per_1k", "x"]
"""fixed2: 12.34. significant: three digits. signed: +0.012. small: 3.2e-05. x: 4.61x. bytes: in one unit a column."""


@dataclass(frozen=True)
class Headline:
    """One metric of a measure as a column of its table.

    metric: its name in the rows. title: the column's header. better: which direction is an improvement, None for
    neither. rank: columns of higher rank are left out first where the table is too wide. folds: moves to the caption
    where all values are equal. exact: the value is counted, not sampled, so it has no interval.
    """

    metric: str
    title: str
    format: Format = "significant"
    better: Literal["low", "high"] | None = None
    rank: int = 0
    folds: bool = False
    exact: bool = False

    def record(self) -> dict[str, Any]:
        """As a run folder's config.yaml keeps it."""
        return asdict(self)


def headlines_from(records: Iterable[Mapping[str, Any]]) -> tuple[Headline, ...]:
    """Headlines from config.yaml; unknown keys are ignored, entries without metric and title skipped."""
    known = {field.name for field in fields(Headline)}
    sound = [record for record in records if isinstance(record, Mapping) and {"metric", "title"} <= set(record)]
    return tuple(Headline(**{key: value for key, value in record.items() if key in known}) for record in sound)
