"""What was found, in sentences with their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.report import units
from kvbench.report.candidates import Candidate, Group, setting_of
from kvbench.report.names import display_name
from kvbench.report.verdict import bytes_text, hits_text, loss_text, losses, name_list, unproven

MOST_GROUPS = 4
MOST_TOLD = 3  # methods with their numbers in one sentence


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
        told = [f"{one.label} in {bytes_text(one, group)} (ΔNLL {_loss(one)})" for one in kept_up[:MOST_TOLD]]
        more = f"; and {name_list([one.label for one in kept_up[MOST_TOLD:]])}" if len(kept_up) > MOST_TOLD else ""
        found.append(f"Without a measurable loss: {'; '.join(told)}{more}.")
    elif judged:
        found.append(_none_kept_up(judged, base))
    smallest = min((one for one in group.members if one.held), key=lambda one: one.held or 0, default=None)
    if smallest is not None and smallest not in kept_up[:MOST_TOLD]:
        found.append(f"The smallest cache is that of {smallest.label}: {bytes_text(smallest, group)}{_at(smallest)}.")
    found += _needles(group, base) + _speed(group, base)
    return found


def _none_kept_up(judged: Sequence[Candidate], base: Candidate) -> str:
    lost = sum(bool(losses(one, base)) for one in judged)
    reasons = Counter(unproven(one, base) for one in judged if not losses(one, base))
    told = [f"{lost} lost beyond the interval"] if lost else []
    told += [f"{count} cannot be judged ({reason})" for reason, count in reasons.most_common()]
    count = f"{len(judged)} methods" if len(judged) > 1 else "one method"
    return f"Of the {count} none is shown to keep up with the full cache: {', '.join(told)}."


def _scope(group: Group, base: Candidate) -> str:
    count, names = len(group.members), len({display_name(one.row) for one in group.members})
    settings = f" in {count} settings" if count > names else ""
    text = f"{names} method{'s' * (names != 1)}{settings} against the full cache"
    told = []
    if (ppl := base.value("ppl")) is not None:
        told.append(f"has a perplexity of {units.fixed_text(ppl, 2)} after {group.contexts['perplexity']:,} tokens")
    if base.held is not None:
        share = base.value("compressible_share")  # None: all of it
        bounded = "" if share is None else f", {units.percent(share)} of it in layers that methods can compress"
        told.append(f"holds {bytes_text(base, Group(base.row))} at {group.contexts['memory']:,} tokens{bounded}")
    return f"{text}, which {' and '.join(told)}." if told else f"{text}."


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
    timed = [(value, one) for one in group.members if (value := one.value("tpot_p50_ms")) is not None]
    if base.value("tpot_p50_ms") is None or not timed:
        return []
    _, fastest = min(timed, key=lambda item: item[0])
    unsteady = [one.label for one in (base, fastest) if one.value("steady") == 0]
    doubt = f" The timing of {' and '.join(unsteady)} was not steady." if unsteady else ""
    return [
        f"At {group.contexts.get('latency', 0):,} tokens of context a token takes {_time(base)} with the full cache "
        f"and {_time(fastest)} with {fastest.label}, the lowest median of the methods.{doubt}"
    ]


def _time(member: Candidate) -> str:
    row = member.numbers["tpot_p50_ms"]
    text = f"{units.significant(row.value or 0)} ms"
    known = row.low is not None and row.high is not None
    return units.interval(text, units.significant(row.low or 0), units.significant(row.high or 0)) if known else text
