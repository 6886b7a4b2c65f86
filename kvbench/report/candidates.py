"""Every compared method with its headline numbers of all measures side by side: for advice, summary and overview."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.report.columns import heads_text, short_model
from kvbench.report.lines import Line, lines_of
from kvbench.report.names import RANDOM, Config, config_of, display_name, is_baseline, labels, layout_of, weights_of
from kvbench.report.needle import INFORMATIVE, Hits, hits_of, total
from kvbench.report.traits import Traits, measured_bounded, traits_of
from kvbench.results.row import Row

QUALITY = ("ppl", "nll_minus_full", "kl", "top1", "engaged", "kept_tokens", "positions_processed")
PER_TOKEN = ("bytes_per_token", "bytes_per_token_layer")
PROTOCOL = "prefill_decode"  # where a measure has several, the one that compresses a prompt and decodes after it
GROUP = ("model", "kv_heads", "converted", "dtype", "device")


def group_key(row: Row) -> tuple[Any, ...]:
    """What must agree before one method's numbers are held against another's: GROUP, and under MLA the layout."""
    return *(getattr(row, name) for name in GROUP), layout_of(row)


@dataclass
class Candidate:
    """One method with its knobs. numbers: a row for each metric; hits: the pooled hit rate for each length."""

    row: Row
    label: str
    numbers: dict[str, Row] = field(default_factory=dict)
    hits: dict[int, Row] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        row = self.numbers.get(metric)
        return None if row is None else row.value

    @property
    def held(self) -> float | None:
        """Bytes a sequence."""
        row = self.numbers.get("held_bytes")
        return None if row is None or row.value is None else row.value / (row.batch or 1)

    @property
    def traits(self) -> Traits:
        """As declared, but for `bounded` where the rows tell."""
        declared = traits_of(self.row)
        measured = measured_bounded(self.row, self.numbers.get("kept_tokens"))
        return declared if measured is None else replace(declared, bounded=measured)


@dataclass
class Group:
    """The methods that were measured in one setting, and where each measure's numbers were taken."""

    row: Row
    baseline: Candidate | None = None
    members: list[Candidate] = field(default_factory=list)  # without the baseline
    contexts: dict[str, int] = field(default_factory=dict)  # measure -> context that its numbers belong to
    lengths: list[int] = field(default_factory=list)  # of needles that the full cache finds

    def ratio(self, candidate: Candidate) -> float | None:
        """How many times less than the full cache it holds."""
        if self.baseline is None or not self.baseline.held or not candidate.held:
            return None
        return self.baseline.held / candidate.held


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """One group a setting, with a candidate for each config, in order of appearance but for random weights: last."""
    names = labels([row for row in rows if row.method])
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.method is not None:
            settings.setdefault(group_key(row), []).append(row)
    return sorted((_group(own, names) for own in settings.values()), key=lambda group: weights_of(group.row) == RANDOM)


def setting_of(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group from the others: `9 KV heads`, `Qwen3-0.6B, bfloat16, cuda`."""
    row, rows = group.row, [other.row for other in groups]
    differing = {name for name in GROUP if len({getattr(other, name) for other in rows}) > 1}
    same_model = [other for other in rows if other.model == row.model]
    told = [short_model(row.model, [other.model for other in rows])] if "model" in differing else []
    if len({layout_of(other) for other in same_model}) > 1:
        told.append(f"mla {layout_of(row)}")
    elif len({other.kv_heads for other in same_model}) > 1:
        told.append(heads_text(row.kv_heads))
    elif len({other.converted for other in same_model}) > 1:
        told.append("converted" if row.converted else "as trained")
    told += [str(getattr(row, name) or "?") for name in ("dtype", "device") if name in differing]
    return ", ".join(told)


def _group(rows: list[Row], names: dict[Config, str]) -> Group:
    group = Group(rows[0])
    found: dict[Config, Candidate] = {}
    for row in rows:
        found.setdefault(config_of(row), Candidate(row, names[config_of(row)]))
    everyone = {config: candidate for config, candidate in found.items() if is_baseline(candidate.row)}
    group.baseline = next(iter(everyone.values()), None)
    group.members = [candidate for config, candidate in found.items() if config not in everyone]
    _take(group, found, rows, "perplexity", (*QUALITY, "held_bytes"))
    # Bytes of the memory measure go before those that the perplexity run counted on its way, unless it was run for
    # fewer of the methods.
    counted = sum("held_bytes" in candidate.numbers for candidate in found.values())
    _take(group, found, rows, "memory", ("held_bytes", "dense_bytes", "compressible_share", *PER_TOKEN), fewest=counted)
    if counted:
        group.contexts.setdefault("memory", group.contexts["perplexity"])
    _take(group, found, rows, "latency", ("tpot_p50_ms", "bandwidth_share", "steady"))
    _take_needles(group, found, rows)
    order = list(dict.fromkeys(display_name(member.row) for member in group.members))
    # What only failed goes last, budgets of a method stand together.
    group.members.sort(key=lambda one: (not one.numbers, order.index(display_name(one.row)), one.row.budget or 0))
    return group


def _take(
    group: Group, found: dict[Config, Candidate], rows: list[Row], measure: str, metrics: Iterable[str], fewest: int = 0
) -> None:
    """Numbers at the longest context at which the baseline was measured; they replace earlier ones for all or none.

    None of them where they are known of fewer than `fewest` methods.
    """
    lines = lines_of(rows, measure)
    told = [line for line in lines if any(line.get(metric) for metric in metrics) and line.row.context is not None]
    told = [line for line in told if line.row.protocol == PROTOCOL] or told
    bases = [line.row.context for line in told if line.baseline] or [line.row.context for line in told]
    if not bases:
        return
    context = max(known for known in bases if known is not None)
    # Of several batch sizes the smallest counts: it stands last and replaces the others.
    here = sorted((line for line in told if line.row.context == context), key=lambda line: -(line.row.batch or 0))
    if len({config_of(line.row) for line in here}) < fewest:
        return
    group.contexts[measure] = context
    for metric in metrics:
        numbers = {config_of(line.row): row for line in here if (row := line.get(metric)) is not None}
        if numbers:
            for candidate in found.values():
                candidate.numbers.pop(metric, None)
        for config, row in numbers.items():
            found[config].numbers[metric] = row


def _take_needles(group: Group, found: dict[Config, Candidate], rows: list[Row]) -> None:
    """Hits by length over the tasks that the full cache itself solves at it; with one task, that task's own rows."""
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
    return _wilson(replace(rows[0], protocol=None), rows[0].context or 0, hits)


def _pooled(line: Line) -> dict[int, Row]:
    """The hit rate over all depths of each length, with its interval."""
    places = hits_of(line)
    result = {}
    for length in {context for context, _ in places if context is not None}:
        row = line.cells.get(("hit_rate", length, None))
        hits = total([hits for (context, _), hits in places.items() if context == length])
        if hits is not None:
            row = row if row is not None and row.low is not None else _wilson(line.row, length, hits)
            result[length] = replace(row, value=hits.rate, n=hits.n)
    return result


def _wilson(row: Row, length: int, hits: Hits) -> Row:
    """Wilson's 95% interval of a share."""
    z2, n, rate = 1.959964**2, hits.n, hits.rate
    centre, reach = (rate + z2 / (2 * n)) / (1 + z2 / n), (z2 * (rate * (1 - rate) / n + z2 / (4 * n * n))) ** 0.5
    low, high = centre - reach / (1 + z2 / n), centre + reach / (1 + z2 / n)
    bounds = {"low": max(0.0, low), "high": min(1.0, high)}
    return replace(row, metric="hit_rate", context=length, depth=None, value=rate, n=n, unit="share", **bounds)
