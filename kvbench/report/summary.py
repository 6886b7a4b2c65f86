"""What was found, in sentences with their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report import units
from kvbench.report.candidates import Candidate, Group, setting_of
from kvbench.report.verdict import bytes_text, hits_text, loss_text, losses, name_list, unproven

MOST_GROUPS = 4


def summary(groups: Sequence[Group]) -> list[str]:
    """A few sentences for each setting that was measured."""
    found = []
    for group in groups[:MOST_GROUPS]:
        prefix = f"{setting_of(group, groups)}: " if len(groups) > 1 else ""
        found += [prefix + sentence for sentence in _sentences(group)]
    if len(groups) > MOST_GROUPS:
        found.append(f"{len(groups) - MOST_GROUPS} more settings stand in the tables.")
    return found


def _sentences(group: Group) -> list[str]:
    base = group.baseline
    if base is None:
        return [f"{len(group.members)} methods were measured, none of them against the full cache."]
    found = [_scope(group, base)]
    judged = [member for member in group.members if "nll_minus_full" in member.numbers]
    kept_up = [one for one in judged if not losses(one, base) and unproven(one, base) is None]
    if kept_up:
        kept_up.sort(key=lambda one: one.held or 0)
        told = [f"{one.label} in {bytes_text(one, group)} (ΔNLL {_loss(one)})" for one in kept_up[:3]]
        more = f" and {len(kept_up) - 3} more" if len(kept_up) > 3 else ""
        found.append(f"Without a measurable loss: {'; '.join(told)}{more}.")
    elif judged:
        found.append(f"None of the {len(judged)} methods kept up with the full cache without a measurable loss.")
    smallest = min((one for one in group.members if one.held), key=lambda one: one.held or 0, default=None)
    if smallest is not None and smallest not in kept_up[:3]:
        found.append(f"The smallest cache is that of {smallest.label}: {bytes_text(smallest, group)}{_at(smallest)}.")
    found += _needles(group, base) + _speed(group, base)
    return found


def _scope(group: Group, base: Candidate) -> str:
    count = len(group.members)
    text = f"{count} method{'s' * (count != 1)} with their settings against the full cache"
    if (ppl := base.value("ppl")) is not None:
        text += f", whose perplexity after {group.contexts['perplexity']:,} tokens is {ppl:.2f}"
    if base.held is not None:
        context = group.contexts.get("memory") or group.contexts.get("perplexity") or 0
        text += f" and which holds {bytes_text(base, Group(base.row))} at {context:,} tokens"
    return text + "."


def _loss(member: Candidate) -> str:
    return loss_text(member.numbers["nll_minus_full"])


def _at(member: Candidate) -> str:
    return f", at a ΔNLL of {_loss(member)}" if "nll_minus_full" in member.numbers else ""


def _needles(group: Group, base: Candidate) -> list[str]:
    measured = [one for one in group.members if "hit_rate" in one.numbers]
    if not group.lengths or not measured:
        return []
    most = base.value("hit_rate") or 0
    full = [one.label for one in measured if (one.value("hit_rate") or 0) >= most]
    told = f"{name_list(full)} find as many" if full else "no method finds as many"
    return [f"In {group.lengths[-1]:,} tokens the full cache finds {hits_text(base)} needles; {told}."]


def _speed(group: Group, base: Candidate) -> list[str]:
    reference = base.value("tpot_p50_ms")
    timed = [(value, one) for one in group.members if (value := one.value("tpot_p50_ms")) is not None]
    if reference is None or not timed:
        return []
    best, fastest = min(timed, key=lambda item: item[0])
    context = group.contexts.get("latency", 0)
    return [
        f"At {context:,} tokens of context a token takes {units.significant(reference)} ms with the full cache and "
        f"{units.significant(best)} ms with {fastest.label}, the fastest of the methods."
    ]
