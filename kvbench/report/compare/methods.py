"""Every compared method with its main numbers of all measures side by side, grouped by model and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvbench.report.compare.comparison import (
    MODEL_AND_DEVICE,
    Config,
    Line,
    comparison_key,
    config_of,
    is_baseline,
    layout_of,
    lines_of,
    weights_of,
)
from kvbench.report.compare.declared import Traits, measured_bounded, traits_of
from kvbench.report.compare.names import display_name, heads_text, labels, short_model
from kvbench.report.compare.needle_hits import INFORMATIVE, Hits, hits_of, total
from kvbench.report.compare.scored_bytes import METRICS, bytes_metric, size_of
from kvbench.report.compare.time_ratios import with_time_ratios
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence
from kvbench.results.intervals import wilson
from kvbench.results.paired import Verdict
from kvbench.results.row import Row

QUALITY = ("ppl", "nll_minus_full", "kl", "top1", "engaged", "kept_tokens", "positions_processed")
WHILE_SCORED = ("scored_kept_tokens", "x_smaller")
BYTES = ("held_bytes", "dense_bytes", "compressible_share", "bytes_per_token", "bytes_per_token_layer")
SPEED = ("tpot_p50_ms", "tpot_to_full", "bandwidth_share", "steady")
PROTOCOL = "prefill_decode"
"""Of several protocols of a measure the one that is taken: compress a prompt, then decode."""


@dataclass
class MethodNumbers:
    """One method with its knobs. numbers: a row for each metric; hits: the pooled hit rate for each length.

    verdict: against the full cache, from the windows of the perplexity; None without samples. scored: bytes of the
    cache that the perplexity was scored with; without a perplexity those of the memory measure.
    """

    row: Row
    label: str
    numbers: dict[str, Row] = field(default_factory=dict)
    hits: dict[int, Row] = field(default_factory=dict)
    verdict: Verdict | None = None
    scored: Row | None = None

    def value(self, metric: str) -> float | None:
        row = self.numbers.get(metric)
        return None if row is None else row.value

    @property
    def held(self) -> float | None:
        """Bytes that the scored cache of one sequence holds."""
        return size_of(self.scored)

    @property
    def traits(self) -> Traits:
        """The declared traits; `bounded` as measured where the rows tell."""
        declared = traits_of(self.row)
        measured = measured_bounded(self.row, self.numbers.get("kept_tokens"))
        return declared if measured is None else replace(declared, bounded=measured)


@dataclass
class Group:
    """The methods measured on one model, precision and device.

    members: all but the baseline. contexts: for each measure, and for `bytes`, the context of its numbers. lengths:
    prompt lengths at which the full cache finds the needles.
    """

    row: Row
    baseline: MethodNumbers | None = None
    members: list[MethodNumbers] = field(default_factory=list)
    contexts: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    @property
    def everyone(self) -> list[MethodNumbers]:
        """The baseline, if it was measured, then the members."""
        return [*([self.baseline] if self.baseline is not None else []), *self.members]

    def times_smaller(self, member: MethodNumbers) -> float | None:
        """Bytes of the full cache over bytes of the method; None if either is unknown."""
        if self.baseline is None or not self.baseline.held or not member.held:
            return None
        return self.baseline.held / member.held


def groups_of(rows: Sequence[Row], evidence: WindowEvidence = NO_EVIDENCE) -> list[Group]:
    """One group for each model and device, in the order of their rows; models with random weights come last.

    evidence: windows from which the methods get their verdicts.
    """
    rows = with_time_ratios(rows)
    names = labels([row for row in rows if row.method])
    settings: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.method is not None:
            settings.setdefault(comparison_key(row, across_measures=True), []).append(row)
    found = [_group(own, names) for own in settings.values()]
    for member in (member for group in found for member in group.members):
        member.verdict = evidence.verdict_of(member.numbers.get("nll_minus_full"))
    return sorted(found, key=lambda group: weights_of(group.row) == "random")


def group_name(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group from the others: `9 KV heads`, `Qwen3-0.6B, bfloat16, cuda`."""
    row, rows = group.row, [other.row for other in groups]
    differing = {name for name in MODEL_AND_DEVICE if len({getattr(other, name) for other in rows}) > 1}
    same_model = [other for other in rows if other.model == row.model]
    parts = [short_model(row.model, [other.model for other in rows])] if "model" in differing else []
    if len({layout_of(other) for other in same_model}) > 1:
        parts.append(f"mla {layout_of(row)}")
    elif len({other.kv_heads for other in same_model}) > 1:
        parts.append(heads_text(row.kv_heads))
    elif len({other.converted for other in same_model}) > 1:
        parts.append("converted" if row.converted else "as trained")
    parts += [str(getattr(row, name) or "?") for name in ("dtype", "device") if name in differing]
    return ", ".join(parts)


def _group(rows: list[Row], names: dict[Config, str]) -> Group:
    group = Group(rows[0])
    found: dict[Config, MethodNumbers] = {}
    for row in rows:
        found.setdefault(config_of(row), MethodNumbers(row, names[config_of(row)]))
    group.baseline = next((one for one in found.values() if is_baseline(one.row)), None)
    group.members = [one for one in found.values() if not is_baseline(one.row)]
    _take(group, found, rows, "perplexity", (*QUALITY, *WHILE_SCORED, *METRICS))
    _take_scored(group, found, rows)
    _take(group, found, rows, "memory", BYTES)
    _take(group, found, rows, "latency", SPEED)
    _take_needles(group, found, rows)
    order = list(dict.fromkeys(display_name(member.row) for member in group.members))
    # Methods without a number come last; the budgets of a method stand together.
    group.members.sort(key=lambda one: (not one.numbers, order.index(display_name(one.row)), one.row.budget or 0))
    return group


def _take(
    group: Group, found: dict[Config, MethodNumbers], rows: list[Row], measure: str, metrics: Iterable[str]
) -> None:
    """Numbers at the longest context at which the baseline was measured. They replace earlier ones of all methods."""
    lines = lines_of(rows, measure)
    known = [line for line in lines if any(line.get(metric) for metric in metrics) and line.row.context is not None]
    known = [line for line in known if line.row.protocol == PROTOCOL] or known
    bases = [line.row.context for line in known if line.baseline] or [line.row.context for line in known]
    if not bases:
        return
    longest = max(context for context in bases if context is not None)
    # Of several batch sizes the smallest counts: it stands last and replaces the others.
    here = sorted((line for line in known if line.row.context == longest), key=lambda line: -(line.row.batch or 0))
    group.contexts[measure] = longest
    for metric in metrics:
        numbers = {config_of(line.row): row for line in here if (row := line.get(metric)) is not None}
        if numbers:
            for one in found.values():
                one.numbers.pop(metric, None)
        for config, row in numbers.items():
            found[config].numbers[metric] = row


def _take_scored(group: Group, found: dict[Config, MethodNumbers], rows: list[Row]) -> None:
    """Bytes beside the quality: those of the perplexity rows, else of the memory measure at the same context.

    Without a perplexity those of the memory measure at its longest context.
    """
    metric = bytes_metric(one.numbers for one in found.values())
    for one in found.values():
        one.scored = one.numbers.get(metric)
        for name in METRICS:
            one.numbers.pop(name, None)
    context = group.contexts.get("perplexity")
    if not any(one.scored for one in found.values()):
        lines = [line for line in lines_of(rows, "memory") if line.get("held_bytes") and line.row.context is not None]
        bases = [line for line in lines if line.baseline] or lines
        longest = max((line.row.context for line in bases if line.row.context is not None), default=None)
        context = longest if context is None else context
        for line in sorted(lines, key=lambda line: -(line.row.batch or 0)):
            if line.row.context == context:
                one = found[config_of(line.row)]
                one.scored = line.get("held_bytes")
                if (smaller := line.get("x_smaller")) is not None:
                    one.numbers["x_smaller"] = smaller
    if context is not None and any(one.scored for one in found.values()):
        group.contexts["bytes"] = context


def _take_needles(group: Group, found: dict[Config, MethodNumbers], rows: list[Row]) -> None:
    """Hits by length over the tasks that the full cache solves at that length; of a single task its own rows."""
    lines = [line for line in lines_of(rows, "needle", by_context=False) if line.row.question in (None, "after")]
    solved: dict[tuple[int, str | None], Row] = {}
    tasks: dict[Config, dict[tuple[int, str | None], Row]] = {}
    for line in lines:
        pooled = {(length, line.row.protocol): row for length, row in _pooled(line).items()}
        tasks.setdefault(config_of(line.row), {}).update(pooled)
        if line.baseline:
            solved |= {place: row for place, row in pooled.items() if (row.value or 0) >= INFORMATIVE}
    group.lengths = sorted({length for length, _ in solved})
    for config, of_task in tasks.items():
        for length in group.lengths:
            wanted = [place for place in solved if place[0] == length]
            if all(place in of_task for place in wanted):
                found[config].hits[length] = _over_tasks([of_task[place] for place in wanted])
        if group.lengths and group.lengths[-1] in found[config].hits:
            found[config].numbers["hit_rate"] = found[config].hits[group.lengths[-1]]


def _over_tasks(rows: list[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    hits = Hits(sum((row.value or 0) * (row.n or 0) for row in rows), sum(row.n or 0 for row in rows))
    return _hit_rate(replace(rows[0], protocol=None), rows[0].context or 0, hits)


def _pooled(line: Line) -> dict[int, Row]:
    """The hit rate over all depths of each length, with its interval."""
    places = hits_of(line)
    result = {}
    for length in {context for context, _ in places if context is not None}:
        row = line.cells.get(("hit_rate", length, None))
        hits = total([hits for (context, _), hits in places.items() if context == length])
        if hits is not None:
            row = row if row is not None and row.low is not None else _hit_rate(line.row, length, hits)
            result[length] = replace(row, value=hits.rate, n=hits.n)
    return result


def _hit_rate(row: Row, length: int, hits: Hits) -> Row:
    low, high = wilson(hits.hits, hits.n)
    found = replace(row, metric="hit_rate", context=length, depth=None, value=hits.rate, n=hits.n, unit="share")
    return replace(found, low=low, high=high)
