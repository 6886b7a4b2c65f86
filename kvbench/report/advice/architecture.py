"""Advice on an architecture: bytes a token in each, and whether its quality was measured comparably."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.advice.advice import Advice
from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import layout_of, weights_of
from kvbench.report.compare.methods import Group
from kvbench.report.compare.names import short_model
from kvbench.report.compare.scored_bytes import size_of
from kvbench.results.row import Row


def advise_architecture(groups: Sequence[Group]) -> Advice:
    """Of the architectures whose perplexity is not worse beyond the intervals, the one with fewest bytes a token.

    Models with converted heads or random weights are left out, because they were not trained with their attention.
    """
    advice = Advice(
        "architecture", "Choosing an architecture", "fewest bytes a token among models of equal quality", groups[0]
    )
    own = [group for group in groups if weights_of(group.row) == "trained" and _per_token(group) is not None]
    left = sum(weights_of(group.row) != "trained" for group in groups)
    if left:
        models = f"{left} model{'s' * (left > 1)} converted or with random weights"
        advice.limits.append(f"{models} left out, because none was trained with its attention")
    own.sort(key=lambda group: _per_token(group) or 0)
    names = [group.row.model for group in groups]
    advice.reasons += [_size_and_quality(group, names) for group in own]
    kinds = {group.row.arch for group in own}
    if len(kinds) < 2:
        known = ", ".join(sorted(str(kind) for kind in kinds)) or "none"
        advice.reasons.clear()
        return advice.abstain(f"architectures measured: {known}; needs two models trained with different attention")
    advice.limits.append("the models differ not only in attention, but in size, training and training text")
    comparable = [group for group in own if _ppl(group) is not None]
    texts = {(row.dataset, row.context, row.tokenizer) for group in comparable if (row := _ppl(group)) is not None}
    if len({group.row.arch for group in comparable}) < 2 or len(texts) > 1:
        return advice.abstain("no two architectures have a perplexity on the same text, context and tokenizer")
    intervals = [_interval(group) for group in comparable]
    lowest = min(high for _, high in intervals)
    as_good = [group for group, (low, _) in zip(comparable, intervals, strict=True) if low <= lowest]
    advice.answer = _name(as_good[0], names) if as_good else None
    if len(as_good) > 1:
        advice.reasons.append(f"runner-up {_name(as_good[1], names)}")
    return advice


def _name(group: Group, models: Sequence[str | None]) -> str:
    layout = layout_of(group.row)
    return f"{group.row.arch}{f' {layout}' if layout else ''} ({short_model(group.row.model, models)})"


def _size_and_quality(group: Group, models: Sequence[str | None]) -> str:
    size = _per_token(group) or 0
    unit, form = number_text.in_bytes([size])
    row = _ppl(group)
    quality = f", perplexity {row.value:.2f} [{row.low:.2f}, {row.high:.2f}]" if row is not None else ""
    return f"{_name(group, models)}: {form(size)} {unit} a token in the full cache{quality}"


def _per_token(group: Group) -> float | None:
    base = group.baseline
    held = (base.numbers.get("held_bytes") or base.scored) if base is not None else None
    size = size_of(held)
    if base is None or held is None or size is None or not held.context:
        return None
    measured = base.value("bytes_per_token")
    return size / held.context if measured is None else measured


def _ppl(group: Group) -> Row | None:
    row = group.baseline.numbers.get("ppl") if group.baseline is not None else None
    return row if row is not None and None not in (row.value, row.low, row.high) else None


def _interval(group: Group) -> tuple[float, float]:
    row = _ppl(group)
    return (0.0, 0.0) if row is None else (row.low or 0.0, row.high or 0.0)
