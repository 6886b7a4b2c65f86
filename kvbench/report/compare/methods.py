"""Every compared method with its main numbers of all measures side by side, grouped by model and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvbench.report.compare.comparison import (
    MODEL_AND_DEVICE,
    Config,
    comparison_key,
    config_of,
    is_baseline,
    layout_of,
    lines_of,
    weights_of,
)
from kvbench.report.compare.declared import Traits, measured_bounded, traits_of
from kvbench.report.compare.names import display_name, heads_text, labels, short_model
from kvbench.report.compare.needle_hits import INFORMATIVE, over_tasks, pooled_rates
from kvbench.report.compare.needle_loss import NeedleLoss, RateKey, needle_loss, unpaired_loss
from kvbench.report.compare.scored_bytes import METRICS, bytes_metric, size_of
from kvbench.report.compare.texts import main_dataset
from kvbench.report.compare.time_ratios import with_time_ratios
from kvbench.report.compare.warnings import GAPS
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence
from kvbench.results.paired import Verdict
from kvbench.results.row import Row

QUALITY = ("ppl", "nll_minus_full", "kl", "top1", *GAPS, "engaged", "kept_tokens", "positions_processed")
WHILE_SCORED = ("scored_kept_tokens", "x_smaller")
BYTES = ("held_bytes", "dense_bytes", "compressible_share", "bytes_per_token", "bytes_per_token_layer")
SPEED = ("tpot_p50_ms", "tpot_to_full", "bandwidth_share", "steady")
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PROTOCOL = "prefill_decode"
"""Of several protocols of a measure the one that is taken: compress a prompt, then decode."""


@dataclass
class MethodNumbers:
    """One method with its knobs. numbers: a row for each metric; hits: the pooled hit rate for each length.

    verdict: against the full cache, from the windows of the perplexity; None without samples. scored: bytes of the
    cache that the perplexity was scored with; without a perplexity those of the memory measure. by_text: the
    perplexity rows by metric on each other data set. needles: found at the longest length. full_tpot: the time per
    output token of the full cache in the run that timed this method.
    """

    row: Row
    label: str
    numbers: dict[str, Row] = field(default_factory=dict)
    hits: dict[int, Row] = field(default_factory=dict)
    verdict: Verdict | None = None
    scored: Row | None = None
    by_text: dict[str, dict[str, Row]] = field(default_factory=dict)
    full_tpot: Row | None = None
    needles: NeedleLoss | None = None

    def value(self, metric: str) -> float | None:
        row = self.numbers.get(metric)
        return None if row is None else row.value

    @property
    def held(self) -> float | None:
        """Bytes that the scored cache of one sequence holds."""
        return size_of(self.scored)

    @property
    def speed(self) -> float | None:
        """Time per output token over that of the full cache in the same run; None without a full cache beside it."""
        return self.value("tpot_to_full")

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
    prompt lengths at which the full cache finds the needles. dataset: of the perplexity.
    """

    row: Row
    baseline: MethodNumbers | None = None
    members: list[MethodNumbers] = field(default_factory=list)
    contexts: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    dataset: str | None = None

    @property
    def everyone(self) -> list[MethodNumbers]:
        """The baseline, if it was measured, then the members."""
        return [*([self.baseline] if self.baseline is not None else []), *self.members]

    def times_smaller(self, member: MethodNumbers) -> float | None:
        """Bytes of the full cache over bytes of the method; None if either is unknown."""
        if self.baseline is None or not self.baseline.held or not member.held:
            return None
        return self.baseline.held / member.held

    def times_smaller_16(self, member: MethodNumbers) -> float | None:
        """Bytes of a full cache in 16 bits over bytes of the method, as measured or from the full cache's bytes."""
        if (measured := member.value("x_smaller")) is not None:
            return measured
        times, item = self.times_smaller(member), ITEM_BYTES.get(str(self.row.dtype))
        return None if times is None or item is None else times * 2 / item


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
    _take_texts(group, found, rows)
    _take(group, found, rows, "memory", BYTES)
    _take(group, found, rows, "latency", SPEED)
    _take_full_times(group, found, rows)
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
    if measure == "perplexity":
        group.dataset = main_dataset(known)
        known = [line for line in known if line.row.dataset == group.dataset]
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


def _take_texts(group: Group, found: dict[Config, MethodNumbers], rows: list[Row]) -> None:
    """Perplexity rows on other data sets than the group's own, at the longest context of each."""
    lines = [line for line in lines_of(rows, "perplexity") if line.row.context is not None]
    lines = [line for line in lines if line.row.protocol == PROTOCOL] or lines
    for line in sorted(lines, key=lambda line: line.row.context or 0):
        own = {metric: row for metric in (*QUALITY, *WHILE_SCORED) if (row := line.get(metric)) is not None}
        if own and line.row.dataset is not None:
            found[config_of(line.row)].by_text[line.row.dataset] = own


def _take_full_times(group: Group, found: dict[Config, MethodNumbers], rows: list[Row]) -> None:
    """Beside each time per output token that of the full cache in the same run, at the same context and batch."""
    timed = [row for row in rows if row.metric == "tpot_p50_ms" and is_baseline(row) and row.value]
    places = {(row.run, row.context, row.batch): row for row in timed}
    for one in found.values():
        if (own := one.numbers.get("tpot_p50_ms")) is not None:
            one.full_tpot = places.get((own.run, own.context, own.batch))


def _take_needles(group: Group, found: dict[Config, MethodNumbers], rows: list[Row]) -> None:
    """Hits by length over the tasks that the full cache solves at that length; of a single task its own rows."""
    lines = [line for line in lines_of(rows, "needle", by_context=False) if line.row.question in (None, "after")]
    solved: dict[tuple[int, str | None], Row] = {}
    tasks: dict[Config, dict[tuple[int, str | None], Row]] = {}
    rates: dict[Config, dict[RateKey, Row]] = {}
    for line in lines:
        pooled = {(length, line.row.protocol): row for length, row in pooled_rates(line).items()}
        tasks.setdefault(config_of(line.row), {}).update(pooled)
        pooled_rows = (row for row in line.cells.values() if row.depth is None)
        over_depths = {(row.metric, row.context, row.protocol): row for row in pooled_rows}
        rates.setdefault(config_of(line.row), {}).update(over_depths)
        if line.baseline:
            solved |= {place: row for place, row in pooled.items() if (row.value or 0) >= INFORMATIVE}
    group.lengths = sorted({length for length, _ in solved})
    for config, of_task in tasks.items():
        for length in group.lengths:
            wanted = [place for place in solved if place[0] == length]
            if all(place in of_task for place in wanted):
                found[config].hits[length] = over_tasks([of_task[place] for place in wanted])
        if group.lengths and group.lengths[-1] in found[config].hits:
            found[config].numbers["hit_rate"] = found[config].hits[group.lengths[-1]]
    full = None if group.baseline is None else group.baseline.numbers.get("hit_rate")
    for config in tasks if full is not None else ():
        longest = [place for place in solved if place[0] == group.lengths[-1]]
        if (own := found[config].numbers.get("hit_rate")) is not None and full is not None:
            found[config].needles = needle_loss(rates[config], longest) or unpaired_loss(own, full)
