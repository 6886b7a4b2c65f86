"""Headlines of a measure: as its run folders record them, else as declared here, else made from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.report.compare.comparison import Line
from kvbench.results.headline import Format, Headline

Recorded = Mapping[str, Sequence[Headline]]
"""Headlines by measure, as the config.yaml of run folders records them."""

COUNTS = (
    Headline("engaged", "engaged", "percent", rank=1, folds=True),
    Headline("kept_tokens", "kept", "count", rank=2, folds=True),
    Headline("positions_processed", "positions", "count", rank=3, folds=True),
)
"""Metrics that every measure has; they stand behind its own."""
SMALLER = Headline("times_smaller", "x smaller", "x", better="high", exact=True)
"""Bytes of the full cache over bytes of the method, made from `held_bytes` of both."""

DECLARED: dict[str, tuple[Headline, ...]] = {
    "perplexity": (
        Headline("ppl", "ppl", "fixed2", better="low"),
        Headline("nll_minus_full", "ΔNLL", "signed", better="low"),
        Headline("kl", "KL", "small", better="low"),
        Headline("top1", "top-1", "percent", better="high"),
        Headline("top5", "top-5", "percent", rank=2, better="high"),
        Headline("kl_reverse", "reverse KL", "small", rank=2, better="low"),
        Headline("nll_minus_full_worst_decile", "worst tenth", "signed", rank=2, better="low"),
        Headline("worse_share", "worse", "percent", rank=2, better="low"),
    ),
    "needle": (
        Headline("hit_rate", "hit rate", "percent", better="high"),
        Headline("hits", "hits", "count", rank=1, better="high"),
    ),
    "memory": (
        Headline("held_bytes", "held", "bytes", better="low", exact=True),
        Headline("dense_bytes", "dense", "bytes", folds=True),
        Headline("analytic_bytes", "formula", "bytes", rank=2),
        Headline("slack_bytes", "slack", "bytes", rank=1),
        Headline("compressible_share", "compressible", "percent", rank=1, folds=True),
        Headline("bits_per_value", "bits/value", "fixed2", better="low", exact=True),
        Headline("peak_prefill_bytes", "peak prefill", "bytes"),
        Headline("peak_decode_bytes", "peak decode", "bytes"),
    ),
    "latency": (
        Headline("prefill_ms", "prefill", "ms", better="low"),
        Headline("observe_ms", "observe", "ms", rank=1, better="low"),
        Headline("compress_ms", "compress", "ms", better="low"),
        Headline("ttft_ms", "TTFT", "ms", rank=1, better="low"),
        Headline("tpot_p50_ms", "TPOT p50", "ms", better="low"),
        Headline("tpot_p90_ms", "p90", "ms", better="low"),
        Headline("tpot_p99_ms", "p99", "ms", rank=1, better="low"),
        Headline("itl_p50_ms", "between tokens", "ms", rank=2, better="low"),
        Headline("tokens_per_s", "tokens/s", "significant", rank=1, better="high"),
        Headline("slope_ms_per_1k", "slope", "ms_per_1k"),
        Headline("bandwidth_share", "bandwidth", "percent", rank=1, better="high"),
        Headline("bytes_per_s", "read a second", "bytes", rank=2),
    ),
    "paging": (
        Headline("contiguous_bytes", "contiguous", "bytes", exact=True),
        Headline("contiguous_waste_bytes", "wasted", "bytes", rank=2, better="low", exact=True),
        Headline("paged_bytes", "paged", "bytes", better="low", exact=True),
        Headline("paged_waste_bytes", "paged wasted", "bytes", rank=2, better="low", exact=True),
        Headline("shared_bytes", "prefix shared", "bytes", better="low", exact=True),
        Headline("saved_bytes", "saved", "bytes", rank=1, better="high", exact=True),
        Headline("positions_saved", "positions saved", "count", rank=1, better="high", exact=True),
        Headline("logit_difference", "logits differ", "small", rank=3, better="low"),
    ),
}
"""For folders that record no headlines, in reading order."""

FORMAT_OF_UNIT: dict[str | None, Format] = {"bytes": "bytes", "ms": "ms", "ms/1k": "ms_per_1k", "share": "percent"}


def headlines_of(measure: str, lines: Sequence[Line], recorded: Recorded | None = None) -> tuple[Headline, ...]:
    """The columns of a measure's table, without COUNTS. SMALLER follows `held_bytes` and replaces `ratio`."""
    found = [*((recorded or {}).get(measure) or DECLARED.get(measure) or _from_rows(lines))]
    metrics = [headline.metric for headline in found]
    if "held_bytes" in metrics:
        found.insert(1 + metrics.index("held_bytes"), SMALLER)
        found = [headline for headline in found if headline.metric != "ratio"]  # leaves slack out
    return tuple(found)


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
    tables = [*DECLARED.values(), *(recorded or {}).values(), (SMALLER,)]
    declared = {one.metric: str(one.better) for table in tables for one in table if one.better is not None}
    return {"nll": "low"} | declared


def reading_order(recorded: Recorded | None = None) -> tuple[str, ...]:
    """Measures in the order in which a report shows them."""
    return tuple(dict.fromkeys([*DECLARED, *(recorded or {})]))
