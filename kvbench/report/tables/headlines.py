"""Headlines of a measure: as its run folders record them, else as its class declares them, else made from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.report.compare.comparison import Line
from kvbench.report.compare.declared import shipped_headlines, shipped_measures
from kvbench.results.headline import Format, Headline

Recorded = Mapping[str, Sequence[Headline]]
"""Headlines by measure, as the config.yaml of run folders records them."""

COUNTS = (
    Headline("engaged", "engaged", "percent", rank=1, folds=True),
    Headline("kept_tokens", "kept", "count", rank=2, folds=True),
    Headline("positions_processed", "positions", "count", rank=3, folds=True),
)
"""Metrics that every measure has. They are shown behind a measure's own, whether it lists them or not."""
SMALLER = Headline("times_smaller", "x smaller", "x", better="high", exact=True)
"""Bytes of the full cache over bytes of the method, made from `held_bytes` of both."""
SIXTEEN_BITS = Headline("x_smaller", "x smaller than 16-bit", "x", better="high", exact=True)
"""Bytes of a full cache in 16 bits over bytes of the method's, means over the scored tokens."""
WINDOWS = Headline("windows", "windows", "count", folds=True)
RETIRED = ("ratio",)
"""Metrics of older rows that no table and no file shows. `ratio` left slack out, so it contradicted `times_smaller`."""
KEPT_WHILE_SCORED = Headline("scored_kept_tokens", "kept while scored", "count", rank=1, folds=True)
KEPT = COUNTS[1]
FORMAT_OF_UNIT: dict[str | None, Format] = {"bytes": "bytes", "ms": "ms", "ms/1k": "ms_per_1k", "share": "percent"}


def headlines_of(measure: str, lines: Sequence[Line], recorded: Recorded | None = None) -> tuple[Headline, ...]:
    """The columns of a measure's table, then COUNTS. SMALLER follows `held_bytes`.

    Tokens kept while scored replace those kept after scoring, if all lines have them.
    """
    found = [*((recorded or {}).get(measure) or shipped_headlines(measure) or _from_rows(lines))]
    found = [SIXTEEN_BITS if headline.metric == SIXTEEN_BITS.metric else headline for headline in found]
    metrics = [headline.metric for headline in found]
    if "held_bytes" in metrics:
        found.insert(1 + metrics.index("held_bytes"), SMALLER)
    found = [headline for headline in found if headline.metric not in RETIRED]
    return with_one_kept((*found, *(count for count in COUNTS if count.metric not in metrics)), lines)


def with_one_kept(headlines: Sequence[Headline], lines: Sequence[Line]) -> tuple[Headline, ...]:
    """Without the tokens kept after scoring, if every line that has them has those kept while scored."""
    known = [line for line in lines if line.get(KEPT.metric)]
    replaced = bool(known) and all(line.get(KEPT_WHILE_SCORED.metric) for line in known)
    return tuple(headline for headline in headlines if not (replaced and headline.metric == KEPT.metric))


def _from_rows(lines: Sequence[Line]) -> tuple[Headline, ...]:
    """Every metric that was measured. In a narrow terminal the last ones are left out first."""
    counted = {headline.metric for headline in COUNTS}
    rows = {row.metric: row for line in lines for row in line.cells.values() if row.metric not in counted}
    return tuple(
        Headline(
            str(metric),
            str(metric).replace("_", " "),
            "bytes" if str(metric).endswith("_bytes") else FORMAT_OF_UNIT.get(row.unit, "significant"),
            rank=0 if place < 2 else 5 + place,
        )
        for place, (metric, row) in enumerate(rows.items())
    )


def better_of(recorded: Recorded | None = None) -> dict[str, str]:
    """For each metric with a direction: `low` or `high` is better."""
    tables = [*map(shipped_headlines, shipped_measures()), *(recorded or {}).values(), (SMALLER,)]
    declared = {one.metric: str(one.better) for table in tables for one in table if one.better is not None}
    return {"nll": "low", "hits": "high"} | declared


def reading_order(recorded: Recorded | None = None) -> tuple[str, ...]:
    """Measures in the order in which a report shows them."""
    return tuple(dict.fromkeys([*shipped_measures(), *(recorded or {})]))
