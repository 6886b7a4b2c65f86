"""The line of the answer card for a new model: bytes a token of each architecture, and quality on shared windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvbench.report.advice.card import CardLine
from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import layout_of, weights_of
from kvbench.report.compare.methods import ITEM_BYTES, Group
from kvbench.report.compare.names import short_model
from kvbench.report.compare.scored_bytes import size_of
from kvbench.report.compare.verdicts import times_text
from kvbench.report.compare.window_verdicts import MARGIN_TEXT, WindowEvidence
from kvbench.results.paired import FEWEST_UNITS, Verdict, verdict
from kvbench.results.row import Row

NEED = "A new model to be trained"
PLAN = "python -m kvbench.plan model=llama3.1-8b context=32768"
LEFT_OUT = "not considered: {} converted or with random weights, because none was trained with its attention"


def new_model(groups: Sequence[Group], evidence: WindowEvidence) -> CardLine:
    """Of the architectures whose NLL stays within the margin of the best one's, the one with fewest bytes a token.

    Compared are full caches of trained models, paired over windows of the same tokens. Models with converted heads or
    random weights are left out, because they were not trained with their attention.
    """
    ranked = f"bytes a token in 16 bits among models within {MARGIN_TEXT} of the best"
    line = CardLine("architecture", NEED, groups[0], ranked, command=PLAN)
    own = [group for group in groups if weights_of(group.row) == "trained" and _per_token(group) is not None]
    if left := sum(weights_of(group.row) != "trained" for group in groups):
        line.limits.append(LEFT_OUT.format(f"{left} model{'s' * (left > 1)}"))
    own.sort(key=lambda group: _per_token(group) or 0)
    if len({group.row.arch for group in own}) < 2:
        known = ", ".join(sorted({str(group.row.arch) for group in own})) or "none"
        return line.abstain(f"architectures measured: {known}; needs two models trained with different attention", PLAN)
    names = [group.row.model for group in groups]
    line.limits.append("the models differ not only in attention, but in size, training and training text")
    line.reasons += [_size(group, names) for group in own]
    scored = [group for group in own if _windows(group, evidence)]
    if len({group.row.arch for group in scored}) < 2:
        return line.abstain("no two architectures have windows in samples.jsonl", PLAN)
    windows = [_windows(group, evidence) for group in scored]
    shared = set.intersection(*(set(each) for each in windows))
    if len({group.row.tokenizer for group in scored}) > 1 or len(shared) < FEWEST_UNITS:
        few = f"{len(shared)} windows of the same tokens were scored by all of them"
        return line.abstain(f"{few}: {FEWEST_UNITS} needed, and one tokenizer", PLAN)
    means = [sum(each[window] for window in shared) / len(shared) for each in windows]
    best = means.index(min(means))
    found = [_against(each, windows[best], shared) for each in windows]
    chosen = next(place for place, one in enumerate(found) if place == best or one.kind == "within_margin")
    line.answer = _name(scored[chosen], names)
    line.smaller = _against_largest(scored[chosen], scored)
    line.cost = "lowest NLL of them" if chosen == best else f"NLL {found[chosen].text()}"
    if chosen != best:
        line.reasons.append(f"lowest NLL: {_name(scored[best], names)}")
    line.reasons += [
        f"{_name(group, names)}: NLL {one.text()}, against {_name(scored[best], names)}"
        for group, one in zip(scored, found, strict=True)
        if group is not scored[best] and group is not scored[chosen]
    ]
    return line


def _name(group: Group, models: Sequence[str | None]) -> str:
    layout = layout_of(group.row)
    return f"{group.row.arch}{f' {layout}' if layout else ''} ({short_model(group.row.model, models)})"


def _size(group: Group, models: Sequence[str | None]) -> str:
    size = _per_token(group) or 0
    unit, form = number_text.in_bytes([size])
    return f"{_name(group, models)}: {form(size)} {unit} a token in the full cache, in 16 bits"


def _against_largest(group: Group, groups: Sequence[Group]) -> str:
    """How many times smaller than the largest cache among the models."""
    own, largest = _per_token(group), max(_per_token(other) or 0 for other in groups)
    return f"{times_text(largest / own)} (largest of these models)" if own else "–"


def _per_token(group: Group) -> float | None:
    """Bytes a token of the full cache, in 16 bits."""
    base, item = group.baseline, ITEM_BYTES.get(str(group.row.dtype))
    held = (base.numbers.get("held_bytes") or base.scored) if base is not None else None
    size = size_of(held)
    if base is None or held is None or size is None or not held.context or item is None:
        return None
    measured = base.value("bytes_per_token")
    return (size / held.context if measured is None else measured) * 2 / item


def _windows(group: Group, evidence: WindowEvidence) -> Mapping[str, float]:
    """NLL of the full cache by window."""
    row: Row | None = group.baseline.numbers.get("ppl") if group.baseline is not None else None
    found = evidence.windows_of(row)
    known = {} if found is None else found.nll
    return {window: nll for window, nll in known.items() if math.isfinite(nll)}


def _against(own: Mapping[str, float], best: Mapping[str, float], shared: set[str]) -> Verdict:
    return verdict([own[window] - best[window] for window in sorted(shared)])
