"""Which method the measured rows support, by scenario; and nothing where they do not.

A method is *supported* only if the rows show that it kept up with the full cache: the interval of its loss holds
zero and ends below `WIDEST_LOSS`, and it finds no fewer needles beyond the intervals. What lost beyond its interval
is never recommended, however small the loss; it is named as what going further would cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbench.report import units
from kvbench.report.architecture import advise_architecture
from kvbench.report.candidates import Candidate, Group
from kvbench.report.names import TRAINED, weights_of
from kvbench.report.verdict import Advice, bytes_text, hits_text, losses, name_list, numbers_of, unproven

EXTREME = 8.0  # times less than the full cache: what "extreme" means here
ALIKE = 1.1  # caches this close in bytes are told apart by quality
FEWEST = 2  # methods with evidence, below which there is nothing to choose from


@dataclass(frozen=True)
class Scenario:
    """A need. suits: why a method is out of the question, None if it is not; needle: judged by retrieval first."""

    key: str
    title: str
    need: str
    suits: Callable[[Candidate, Group], str | None]
    needle: bool = False


def advise(groups: Sequence[Group]) -> list[Advice]:
    """Every scenario for every group of methods that were measured together, the architectures last."""
    found = [_advise(scenario, group) for group in groups if weights_of(group.row) == TRAINED for scenario in SCENARIOS]
    return [*found, advise_architecture(groups)] if groups else []


def _shrinks(candidate: Candidate, group: Group) -> str | None:
    if candidate.traits.retraining:
        return "needs retraining"
    return None if (group.ratio(candidate) or 0) > 1 else "saves no memory"


def _stays_bounded(candidate: Candidate, group: Group) -> str | None:
    return None if candidate.traits.bounded else "its cache grows with the text"


def _extremely(candidate: Candidate, group: Group) -> str | None:
    return None if (group.ratio(candidate) or 0) >= EXTREME else f"saves less than {EXTREME:g}x"


SCENARIOS = (
    Scenario(
        "shrink",
        "Shrink the memory of an existing model now",
        "the least memory at no measurable loss, without retraining",
        _shrinks,
    ),
    Scenario(
        "streaming",
        "Endless streaming at fixed memory",
        "a cache that stops growing, at no measurable loss",
        _stays_bounded,
    ),
    Scenario(
        "retrieval",
        "Exact retrieval from long documents",
        "every fact still found, then the least memory",
        _shrinks,
        needle=True,
    ),
    Scenario("extreme", "Extreme memory", f"at least {EXTREME:g} times less than the full cache", _extremely),
)


@dataclass
class _Sorted:
    """Members by what may be said of them."""

    supported: list[Candidate] = field(default_factory=list)
    lost: list[Candidate] = field(default_factory=list)
    unproven: dict[str, list[str]] = field(default_factory=dict)  # reason -> labels


def _advise(scenario: Scenario, group: Group) -> Advice:
    advice = Advice(scenario.key, scenario.title, scenario.need, group)
    base = group.baseline
    if base is None:
        return advice.silent("the full cache was not measured, so there is nothing to hold a method against")
    if base.held is None:
        return advice.silent("no memory was measured, neither by the memory measure nor beside the perplexity")
    if scenario.needle and not group.lengths:
        return advice.silent("no needle was measured that the full cache itself finds")
    suited = [member for member in group.members if scenario.suits(member, group) is None]
    found = _sort(suited, base, scenario)
    advice.limits += _limits(scenario, group, found)
    judged = len(found.supported) + len(found.lost)
    if judged < FEWEST:
        return advice.silent(_too_few(judged, scenario, group))
    order = _by_needles if scenario.needle else _by_bytes
    advice.choice = order(found.supported)
    advice.runner_up = order([one for one in found.supported if one is not advice.choice])
    _explain(advice, scenario, found)
    return advice


def _too_few(judged: int, scenario: Scenario, group: Group) -> str:
    reasons = Counter(filter(None, (scenario.suits(member, group) for member in group.members)))
    told = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    told = f"; ruled out: {told}" if told else ""
    found = f"{judged or 'none'} of the {len(group.members)} measured methods" if group.members else "no method"
    return f"{found} can be judged here and it takes {FEWEST} to choose{told}"


def _sort(members: Sequence[Candidate], base: Candidate, scenario: Scenario) -> _Sorted:
    found = _Sorted()
    for member in members:
        reason = unproven(member, base, needle=scenario.needle)
        if losses(member, base):
            found.lost.append(member)
        elif reason is not None:
            found.unproven.setdefault(reason, []).append(member.label)
        else:
            found.supported.append(member)
    return found


def _by_bytes(members: Sequence[Candidate]) -> Candidate | None:
    """The smallest; among those hardly larger the one that is closest to the full cache."""
    sizes = [member.held for member in members if member.held]
    near = [member for member in members if member.held and member.held <= ALIKE * min(sizes)]
    return min(near, key=_distance, default=None)


def _by_needles(members: Sequence[Candidate]) -> Candidate | None:
    most = max((member.value("hit_rate") or 0 for member in members), default=0)
    return _by_bytes([member for member in members if (member.value("hit_rate") or 0) >= most])


def _distance(member: Candidate) -> float:
    """From the full cache, in nats a token: KL if it was measured, else the loss."""
    kl, loss = member.value("kl"), member.value("nll_minus_full")
    return kl if kl is not None else loss if loss is not None else float("inf")


def _explain(advice: Advice, scenario: Scenario, found: _Sorted) -> None:
    choice, second, group = advice.choice, advice.runner_up, advice.group
    if choice is not None:
        advice.reasons.append(f"{choice.label}: {numbers_of(choice, group)}")
        if second is not None:
            advice.reasons.append(f"runner-up {second.label}: {numbers_of(second, group)}")
            advice.reasons += _nearer(choice, second)
            advice.limits += _alike(choice, second, scenario)
        further = [one for one in found.lost if one.held is not None and one.held < (choice.held or 0)]
        cheapest = min(further, key=_loss, default=None)
        word = "going further costs quality"
    else:
        known = [one for one in found.lost if one.held is not None]
        cheapest, word = min(known, key=_loss, default=None), "the least loss among those that lost"
        advice.reasons.append(f"none of the {len(found.lost)} judged methods kept up with the full cache")
    if found.lost:
        advice.reasons.append(f"lost beyond their intervals: {name_list([one.label for one in found.lost])}")
    if cheapest is not None and group.baseline is not None:
        told = "; ".join(losses(cheapest, group.baseline))
        advice.reasons.append(f"{word}: {cheapest.label} holds {bytes_text(cheapest, group)} but lost ({told})")


def _loss(member: Candidate) -> tuple[float, float]:
    return (1 - (member.value("hit_rate") or 0), member.value("nll_minus_full") or 0)


def _nearer(choice: Candidate, second: Candidate) -> list[str]:
    """Why the runner-up is no more than that although it holds less."""
    if second.held is None or choice.held is None or second.held >= choice.held or _distance(choice) == float("inf"):
        return []
    if (choice.value("hit_rate") or 0) > (second.value("hit_rate") or 0):
        return []
    word = "KL" if choice.value("kl") is not None else "ΔNLL"
    one, other = (units.small(_distance(member)) for member in (choice, second))
    return [f"{second.label} holds hardly less and is further from the full cache: {word} {other} against {one}"]


def _alike(choice: Candidate, second: Candidate, scenario: Scenario) -> list[str]:
    near = (choice.held or 0) * ALIKE >= (second.held or 0)
    if scenario.needle and choice.value("hit_rate") == second.value("hit_rate"):
        judge = "nearness to the full cache" if near else "memory"
        return [f"{choice.label} and {second.label} find the same number of needles: {judge} decides between them"]
    one, other = choice.numbers.get("kl"), second.numbers.get("kl")
    if near and one and other and one.high is not None and other.low is not None and one.high >= other.low:
        return [f"{choice.label} and {second.label} hold about the same, and their KL intervals overlap"]
    return []


def _limits(scenario: Scenario, group: Group, found: _Sorted) -> list[str]:
    """What the data cannot say."""
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
        limits.append("retrieval was not measured, or the full cache itself fails at it")
    if scenario.key == "streaming" and scored is not None:
        limits.append("nothing was streamed beyond the scored tokens: endless is not measured")
    if group.row.dataset:
        limits.append(f"one model ({group.row.model}) on one text ({group.row.dataset})")
    for reason, labels in found.unproven.items():
        limits.append(f"not judged, {reason}: {name_list(labels)}")
    return limits
