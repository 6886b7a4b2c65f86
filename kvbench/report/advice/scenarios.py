"""Advice for four needs: the method that the data support for each, or none.

A method is *supported* only if its windows show a loss within the margin, and if it does not find fewer needles beyond
the intervals. A method that is worse is never recommended; the one with the least loss is named as the price of a
smaller cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbench.report.advice.advice import Advice
from kvbench.report.advice.architecture import advise_architecture
from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import weights_of
from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.names import name_list
from kvbench.report.compare.verdicts import (
    bytes_text,
    higher_nll,
    hits_text,
    judged_loss,
    losses,
    not_judged,
    numbers_of,
    windows_needed,
)
from kvbench.report.compare.window_verdicts import MARGIN_TEXT

EXTREME = 8.0
"""How many times smaller than the full cache a cache must be for the scenario "extreme"."""
ALIKE = 1.1
"""Caches within this ratio in bytes count as equally small; quality decides between them."""
FEWEST = 2
"""Judged methods from which a choice is made."""


@dataclass(frozen=True)
class Scenario:
    """A need. unsuited: why a method cannot serve it, None if it can. needle: retrieval is compared first."""

    key: str
    title: str
    need: str
    unsuited: Callable[[MethodNumbers, Group], str | None]
    needle: bool = False


def advise(groups: Sequence[Group]) -> list[Advice]:
    """Advice for each scenario and each group with trained weights, then on the architecture."""
    found = [
        _advise(scenario, group) for group in groups if weights_of(group.row) == "trained" for scenario in SCENARIOS
    ]
    return [*found, advise_architecture(groups)] if groups else []


def _saves_nothing(method: MethodNumbers, group: Group) -> str | None:
    if method.traits.retraining:
        return "needs retraining"
    return None if (group.times_smaller(method) or 0) > 1 else "saves no memory"


def _grows(method: MethodNumbers, group: Group) -> str | None:
    return None if method.traits.bounded else "its cache grows with the text"


def _saves_too_little(method: MethodNumbers, group: Group) -> str | None:
    return None if (group.times_smaller(method) or 0) >= EXTREME else f"less than {EXTREME:g}x smaller"


SCENARIOS = (
    Scenario(
        "shrink",
        "Shrink the memory of an existing model now",
        f"the smallest cache within {MARGIN_TEXT} of the full cache, without retraining",
        _saves_nothing,
    ),
    Scenario(
        "streaming",
        "Endless streaming at fixed memory",
        f"a cache that stops growing, within {MARGIN_TEXT} of the full cache",
        _grows,
    ),
    Scenario(
        "retrieval",
        "Exact retrieval from long documents",
        "as many needles found as with the full cache, then the smallest cache",
        _saves_nothing,
        needle=True,
    ),
    Scenario("extreme", "Extreme memory", f"at least {EXTREME:g}x smaller than the full cache", _saves_too_little),
)


@dataclass
class _Judged:
    """The methods of a group by verdict. unknown: for each reason the methods that cannot be judged."""

    supported: list[MethodNumbers] = field(default_factory=list)
    lost: list[MethodNumbers] = field(default_factory=list)
    unknown: dict[str, list[str]] = field(default_factory=dict)


def _advise(scenario: Scenario, group: Group) -> Advice:
    advice = Advice(scenario.key, scenario.title, scenario.need, group)
    base = group.baseline
    if base is None:
        return advice.abstain("the full cache was not measured, so no method can be compared with it")
    if base.held is None:
        return advice.abstain("no bytes of the scored cache were measured: type measure=[perplexity]")
    if scenario.needle and not group.lengths:
        return advice.abstain("no needle was measured that the full cache itself finds: type measure=[needle]")
    suited = [member for member in group.members if scenario.unsuited(member, group) is None]
    found = _judge(suited, base, scenario)
    advice.limits += _limits(scenario, group, found)
    judged = len(found.supported) + len(found.lost)
    if judged < FEWEST:
        return advice.abstain(_too_few(found, scenario, group))
    order = _by_needles if scenario.needle else _by_bytes
    advice.choice = order(found.supported)
    advice.runner_up = order([one for one in found.supported if one is not advice.choice])
    _explain(advice, scenario, found)
    return advice


def _too_few(judgements: _Judged, scenario: Scenario, group: Group) -> str:
    judged = len(judgements.supported) + len(judgements.lost)
    reasons = Counter(filter(None, (scenario.unsuited(member, group) for member in group.members)))
    reasons += Counter({reason: len(labels) for reason, labels in judgements.unknown.items()})
    listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    excluded = f"; excluded: {listed}" if listed else ""
    found = f"{judged or 'none'} of the {len(group.members)} measured methods" if group.members else "no method"
    return f"{found} can be judged for this need, a choice needs {FEWEST}{excluded}"


def _judge(members: Sequence[MethodNumbers], base: MethodNumbers, scenario: Scenario) -> _Judged:
    found = _Judged()
    for member in members:
        reason = not_judged(member, needle=scenario.needle)
        if losses(member, base):
            found.lost.append(member)
        elif reason is not None:
            found.unknown.setdefault(reason, []).append(windows_needed(member))
        else:
            found.supported.append(member)
    return found


def _by_bytes(members: Sequence[MethodNumbers]) -> MethodNumbers | None:
    """The smallest cache; of caches within ALIKE of it the one with the smallest loss."""
    sizes = [member.held for member in members if member.held]
    near = [member for member in members if member.held and member.held <= ALIKE * min(sizes)]
    return min(near, key=_distance, default=None)


def _by_needles(members: Sequence[MethodNumbers]) -> MethodNumbers | None:
    most = max((member.value("hit_rate") or 0 for member in members), default=0)
    return _by_bytes([member for member in members if (member.value("hit_rate") or 0) >= most])


def _distance(member: MethodNumbers) -> float:
    """Nats a token from the full cache: KL if it was measured, else the loss."""
    kl, loss = member.value("kl"), member.value("nll_minus_full")
    return kl if kl is not None else loss if loss is not None else float("inf")


def _explain(advice: Advice, scenario: Scenario, found: _Judged) -> None:
    choice, second, group = advice.choice, advice.runner_up, advice.group
    if choice is not None:
        advice.reasons.append(f"{choice.label}: {numbers_of(choice, group)}")
        if second is not None:
            advice.reasons.append(f"runner-up {second.label}: {numbers_of(second, group)}")
            advice.reasons += _nearer(choice, second)
            advice.limits += _alike(choice, second, scenario)
        further = [one for one in found.lost if one.held is not None and one.held < (choice.held or 0)]
        cheapest = _least_loss(further, scenario)
        word = "a smaller cache costs quality"
    else:
        known = [one for one in found.lost if one.held is not None]
        cheapest = _least_loss(known, scenario)
        word = "fewest needles lost" if scenario.needle else "smallest loss"
        count = len(found.lost)
        advice.reasons.append(f"all {count} judged methods are worse than the full cache, in NLL or in needles")
    if found.lost:
        advice.reasons.append(f"worse than the full cache: {name_list([one.label for one in found.lost])}")
    if cheapest is not None and group.baseline is not None:
        loss = cheapest.numbers.get("nll_minus_full")
        nll = [] if loss is None or scenario.needle or higher_nll(cheapest) else [judged_loss(cheapest, loss)]
        measured = "; ".join([*nll, *losses(cheapest, group.baseline)])
        advice.reasons.append(f"{word}: {cheapest.label} holds {bytes_text(cheapest, group)}, with {measured}")


def _least_loss(members: Sequence[MethodNumbers], scenario: Scenario) -> MethodNumbers | None:
    """By needles first where the scenario is about retrieval, else by NLL first."""

    def loss(member: MethodNumbers) -> tuple[float, float]:
        missed, nll = 1 - (member.value("hit_rate") or 0), member.value("nll_minus_full") or 0
        return (missed, nll) if scenario.needle else (nll, missed)

    return min(members, key=loss, default=None)


def _nearer(choice: MethodNumbers, second: MethodNumbers) -> list[str]:
    """Why the runner-up is not the choice although it holds less."""
    if second.held is None or choice.held is None or second.held >= choice.held or _distance(choice) == float("inf"):
        return []
    if (choice.value("hit_rate") or 0) > (second.value("hit_rate") or 0):
        return []
    word = "KL" if choice.value("kl") is not None else "ΔNLL"
    one, other = (number_text.small(_distance(member)) for member in (choice, second))
    return [f"{second.label} holds less by under 10% and is further from the full cache: {word} {other} against {one}"]


def _alike(choice: MethodNumbers, second: MethodNumbers, scenario: Scenario) -> list[str]:
    near = (choice.held or 0) * ALIKE >= (second.held or 0)
    if scenario.needle and choice.value("hit_rate") == second.value("hit_rate"):
        judge = "the smaller distance to the full cache" if near else "memory"
        return [f"{choice.label} and {second.label} find the same number of needles: {judge} decides between them"]
    one, other = choice.numbers.get("kl"), second.numbers.get("kl")
    if near and one and other and one.high is not None and other.low is not None and one.high >= other.low:
        return [f"{choice.label} and {second.label} hold about the same, and their KL intervals overlap"]
    return []


def _limits(scenario: Scenario, group: Group, found: _Judged) -> list[str]:
    """What the data do not show."""
    limits = []
    base = group.baseline
    context = group.contexts.get("perplexity")
    scored = base.numbers.get("ppl") if base is not None else None
    if scored is None or context is None:
        limits.append("perplexity was not measured")
    else:
        limits.append(f"perplexity measured after {context:,} tokens of context only, {scored.n or 0:,} tokens scored")
    if group.lengths:
        limits.append(f"needle measured up to {group.lengths[-1]:,} tokens only ({hits_text(base)} for the full cache)")
    elif not scenario.needle:
        limits.append("retrieval was not measured, or the full cache fails at it too")
    if scenario.key == "streaming" and scored is not None:
        limits.append("no text longer than the scored tokens was streamed")
    if group.row.dataset:
        limits.append(f"one model ({group.row.model}) and one text ({group.row.dataset})")
    for reason, labels in found.unknown.items():
        limits.append(f"not judged because {reason}: {name_list(labels)}")
    return limits
