"""Checks that need no forward pass: settings, the list of samples, rows recomputed from samples, arithmetic of rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvbench.files import plain
from kvbench.measures.context import MethodRun
from kvbench.results.row import ROLES, Row, flags_of
from kvbench.results.verification import Check
from kvbench.verify.cells import CellRecord, with_methods
from kvbench.verify.rebuilt import Rebuilt
from kvbench.verify.recorded import Recorded, claim_of_row, entries_of
from kvbench.verify.tolerance import Tolerance

ROUNDING = 1e-6
"""Relative difference that another order of summation explains in a mean or an interval."""
SETTINGS = (*ROLES["identity"], *ROLES["follows"], "dtype", "seed", "bos")
HASHED = ("revision", "tokenizer")
"""Columns that hold hashes."""
TIES = 0.1
"""Share of an interval's width by which its bounds may differ: a bootstrap draws tied windows in another order where
their sums differ in the last bit."""
UNEVEN = 0.01
"""Relative difference of x_smaller that a smaller last batch, or another version of the source, explains."""
PLACE = ("protocol", "question", "dataset", "context")
"""Columns that tell the rows of one method and metric apart; older rows may lack one. `depth` and `position` too."""
MOST = 3
"""Faults of one check that its line names; the others are counted."""


def settings_check(recorded: Recorded, rebuilt: Rebuilt, tolerance: Tolerance) -> Check:
    """The methods, the model and the settings that rows name are those of config.yaml.

    Another version of the source may hash weights and tokenizers in another way; scores tell those apart then.
    """
    compared = [name for name in SETTINGS if tolerance.same_source or name not in HASHED]
    wrong = list(rebuilt.unlike)
    if recorded.missing:
        wrong.append(f"{recorded.missing} rows that status.json counts are missing")
    odd: Counter[str] = Counter()
    for row in recorded.rows:
        method = rebuilt.methods.get(claim_of_row(row))
        for name in compared:
            if method is None:
                break
            told, now = getattr(row, name), getattr(method.row, name)
            if told is not None and now is not None and told != now:
                odd[f"{name} is {told} in rows and {now} by config.yaml"] += 1
    wrong += [f"{line} ({count} rows)" for line, count in odd.items()]
    return check_of(
        "settings",
        wrong,
        f"{len({one.label for one in rebuilt.methods.values()})} methods, model and text as config.yaml has them",
    )


def samples_check(cells: Sequence[CellRecord], stray: Sequence[str]) -> Check:
    """Every sample that config.yaml calls for is listed once, in order, and holds the tokens that it must hold."""
    wrong, listed = list(stray), []
    for cell in cells:
        if cell.verification is None:
            continue
        listed.append(f"{len(cell.samples)} {cell.verification.unit}s of {cell.name}")
        if len(cell.samples) != len(cell.records):
            wrong.append(
                f"{cell.name}: {len(cell.samples)} samples are listed, config.yaml calls for {len(cell.records)}"
            )
        for number, (record, sample) in enumerate(zip(cell.records, cell.samples, strict=False)):
            if different := _different(record, sample):
                wrong.append(f"{cell.name}: {cell.verification.unit} {number}: {different}")
        if len({str([_named(entry) for entry in entries_of(sample)]) for sample in cell.samples}) > 1:
            wrong.append(f"{cell.name}: samples list different methods")
    return check_of("samples", wrong, f"{', '.join(listed)}: the same text, template and tokens" if listed else "none")


def _different(record: Mapping[str, Any], sample: Mapping[str, Any]) -> str | None:
    for name, value in plain(record).items():
        if name in sample and sample[name] != value:
            told = " (another text, tokenizer or template)" if "sha256" in name else ""
            return f"{name} is {str(sample[name])[:60]}, must be {str(value)[:60]}{told}"
    return None


def _named(entry: Mapping[str, Any]) -> Any:
    return [entry.get("method"), entry.get("store"), entry.get("knobs")]


def rows_check(cells: Sequence[CellRecord], rebuilt: Rebuilt, tolerance: Tolerance) -> Check:
    """Rows that samples determine say what the samples say: means, hits / n, differences, intervals, gap closed."""
    wrong: list[str] = []
    checked, others = 0, Counter[str]()
    for cell in cells:
        if cell.verification is None or len(cell.samples) != len(cell.records):
            continue
        methods = cell.methods(rebuilt)
        if unsampled := [label for label in cell.labels if label not in {one.label for one in methods}]:
            wrong.append(f"{cell.name}: {', '.join(unsampled)} has rows and no samples")
            continue
        try:
            expected = _expected(cell, methods, rebuilt)
        except (KeyError, TypeError, ValueError) as error:
            wrong.append(f"{cell.name}: samples hold no usable scores ({type(error).__name__}: {error})")
            continue
        matched = set()
        for method, row in cell.rows:
            fit = next((one for one in expected.get((method.label, row.metric), ()) if _same_place(row, one)), None)
            if fit is None:
                others[str(row.metric)] += 1
                continue
            matched.add(id(fit))
            checked += 1
            if fault := _fault(row, fit, tolerance.same_source):
                wrong.append(f"{cell.name}, {method.label}: {row.metric} {fault}")
        left = [row for label in cell.labels for key, rows in expected.items() if key[0] == label for row in rows]
        lost = Counter(str(row.metric) for row in left if id(row) not in matched)
        lost = Counter({name: count for name, count in lost.items() if not name.startswith("gap_closed")})
        if lost and tolerance.same_source:
            wrong.append(f"{cell.name}: rows are missing: {_counted(lost)}")
    rest = f"; {sum(others.values())} do not follow from samples ({_counted(others)})" if others else ""
    return check_of("rows", wrong, f"{checked} rows follow from the samples{rest}")


def _expected(
    cell: CellRecord, methods: Sequence[MethodRun], rebuilt: Rebuilt
) -> dict[tuple[str, str | None], list[Row]]:
    assert cell.verification is not None
    context = with_methods(rebuilt.context, methods)
    found: dict[tuple[str, str | None], list[Row]] = {}
    by_knobs = {_knobs(method.row): method.label for method in context.methods}
    for row in cell.verification.rows(context, cell.scores(rebuilt)):
        found.setdefault((by_knobs[_knobs(row)], row.metric), []).append(row)
    return found


def _knobs(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in ROLES["knob"])


def _same_place(row: Row, other: Row) -> bool:
    if (row.depth, row.position) != (other.depth, other.position):
        return False
    return all(getattr(row, name) in (None, getattr(other, name)) for name in PLACE)


def _fault(row: Row, expected: Row, same_source: bool) -> str | None:
    """What a row says other than its samples. Intervals and flags are held against those of the same source alone:
    other versions may draw an interval in another way."""
    for name in ("value", "n"):
        if not _near(getattr(row, name), getattr(expected, name)):
            return f"{name} is {getattr(row, name)}, samples give {getattr(expected, name)}"
    if same_source and expected.low is not None and expected.high is not None:
        width = expected.high - expected.low
        for name in ("low", "high"):
            told, must = getattr(row, name), getattr(expected, name)
            if told is None or abs(told - must) > TIES * width + ROUNDING * abs(must):
                return f"{name} is {told}, samples give {must}"
    lost = sorted(flags_of(expected) - flags_of(row))
    return f"lacks the flag {lost[0]}" if same_source and lost else None


def arithmetic_check(cells: Sequence[CellRecord], rebuilt: Rebuilt, tolerance: Tolerance) -> Check:
    """Rows agree with each other: intervals hold their values, parts add up, ratios are ratios, slopes follow."""
    wrong = [
        f"{cell.name}, {method.label}: {row.metric} {row.value} lies outside its interval {row.low} to {row.high}"
        for cell in cells
        for method, row in cell.rows
        if not _inside(row)
    ]
    count = sum(len(cell.rows) for cell in cells)
    for cell in cells:
        rows: dict[str, list[Row]] = {}
        for method, row in cell.rows:
            rows.setdefault(method.label, []).append(row)
        share = ROUNDING if _whole_batches(cell, rebuilt) and tolerance.same_source else UNEVEN
        wrong += [f"{cell.name}: {line}" for line in (*_full_bytes(rows, share), *_ratios(rows, rebuilt))]
        for label, mine in rows.items():
            wrong += [f"{cell.name}, {label}: {line}" for line in (*_buckets(mine), *_parts(mine), *_times(mine))]
    return check_of("arithmetic", wrong, f"{count} rows agree with each other")


def _inside(row: Row) -> bool:
    if row.value is None or row.low is None or row.high is None or "worst_decile" in str(row.metric):
        return True
    slack = ROUNDING * max(abs(row.value), 1e-3)
    return row.low - slack <= row.value <= row.high + slack


def _buckets(rows: Sequence[Row]) -> Iterator[str]:
    """The means by position, weighted by their tokens, are the mean."""
    for metric in ("nll", "kl"):
        parts = [row for row in rows if row.metric == f"{metric}_at" and row.value is not None and row.n]
        whole = next((row for row in rows if row.metric == metric and parts and row.dataset == parts[0].dataset), None)
        if whole is not None and whole.value is not None:
            mean = sum((row.value or 0.0) * (row.n or 0) for row in parts) / sum(row.n or 0 for row in parts)
            if not _near(mean, whole.value):
                yield f"{metric}_at by position has the mean {mean}, {metric} is {whole.value}"


def _parts(rows: Sequence[Row]) -> Iterator[str]:
    """held_bytes is the sum of its parts."""
    held = next((row.value for row in rows if row.metric == "held_bytes" and row.measure == "memory"), None)
    parts = [row.value or 0.0 for row in rows if (row.metric or "").startswith("held_bytes.")]
    if held is not None and parts and not _near(sum(parts), held):
        yield f"held_bytes is {held:,.0f}, its parts add up to {sum(parts):,.0f}"


def _times(rows: Sequence[Row]) -> Iterator[str]:
    """Percentiles are in order, and the time to the first token is no less than what it is made of."""
    value = {row.metric: row.value for row in rows if row.value is not None and row.measure == "latency"}
    names = [name for name in ("tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms") if name in value]
    for low, high in pairwise(names):
        if (value[low] or 0) > (value[high] or 0):
            yield f"{low} is above {high}"
    parts = sum(value.get(name) or 0.0 for name in ("prefill_ms", "observe_ms", "compress_ms"))
    if "ttft_ms" in value and (value["ttft_ms"] or 0) < parts * (1 - ROUNDING):
        yield f"ttft_ms is {value['ttft_ms']}, less than prefill, observation and compression ({parts})"


def _ratios(rows: Mapping[str, Sequence[Row]], rebuilt: Rebuilt) -> Iterator[str]:
    """tpot_to_full is the ratio of the medians, where both ran as many steps."""
    full = _one(rows.get(rebuilt.context.baseline.label, ()), "tpot_p50_ms")
    for label, mine in rows.items():
        median, ratio = _one(mine, "tpot_p50_ms"), _one(mine, "tpot_to_full")
        if full is None or median is None or ratio is None or not full.n == median.n == ratio.n:
            continue
        if not _near(ratio.value, (median.value or 0.0) / (full.value or math.nan)):
            yield f"{label}: tpot_to_full is {ratio.value}, the medians give {(median.value or 0) / (full.value or 1)}"


def _whole_batches(cell: CellRecord, rebuilt: Rebuilt) -> bool:
    """Whether all batches of the cell are equally large."""
    return cell.verification is None or len({len(one) for one in cell.verification.batches(rebuilt.context)}) == 1


def _full_bytes(rows: Mapping[str, Sequence[Row]], share: float) -> Iterator[str]:
    """x_smaller times the bytes held is the full cache in 16 bits: the same for every method."""
    first: float | None = None
    for label, mine in rows.items():
        smaller, held = _one(mine, "x_smaller"), _one(mine, "scored_bytes") or _one(mine, "held_bytes")
        if smaller is None or held is None or smaller.value is None or held.value is None:
            continue
        full = smaller.value * held.value
        first = full if first is None else first
        if abs(full - first) > share * first:
            of = f"{label}: x_smaller {smaller.value:.6g} of {held.value:,.0f} bytes"
            yield f"{of} stands for a full cache of {full:,.0f} bytes, other methods' for {first:,.0f}"


def _one(rows: Sequence[Row], metric: str) -> Row | None:
    return next((row for row in rows if row.metric == metric), None)


def _near(a: Any, b: Any) -> bool:
    """Whether two numbers are the same but for rounding; None is nan."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return not _is_finite(a) and not _is_finite(b)
    return bool(abs(a - b) <= ROUNDING * max(abs(a), abs(b), ROUNDING))


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


def check_of(name: str, wrong: Sequence[str], fine: str) -> Check:
    """A check that passes where nothing is wrong; its line names the first faults."""
    more = f"; and {len(wrong) - MOST} more" if len(wrong) > MOST else ""
    return Check(name, not wrong, fine if not wrong else "; ".join(wrong[:MOST]) + more)
