"""Sentences that state what was measured, with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import sees_future
from kvbench.report.compare.methods import Group, MethodNumbers, group_name
from kvbench.report.compare.names import display_name, name_list
from kvbench.report.compare.verdicts import bytes_text, fewer_needles, higher_nll, hits_text, judged_loss, not_judged
from kvbench.report.compare.window_verdicts import MARGIN_TEXT
from kvbench.results.row import Row

MOST_GROUPS = 4
MOST_METHODS = 3
"""Methods with their numbers in one sentence."""


def summary(groups: Sequence[Group]) -> list[str]:
    """A few sentences for each of the first groups."""
    found = []
    for group in groups[:MOST_GROUPS]:
        prefix = f"{group_name(group, groups)}: " if len(groups) > 1 else ""
        found += [prefix + sentence for sentence in _sentences(group)]
    if len(groups) > MOST_GROUPS:
        found.append(f"The tables hold {len(groups) - MOST_GROUPS} more settings.")
    return found


def _sentences(group: Group) -> list[str]:
    base = group.baseline
    if base is None:
        return [f"{len(group.members)} methods were measured, but not the full cache to compare them with."]
    found = [_scope(group, base)]
    real = [member for member in group.members if not sees_future(member.row)]
    compared = [member for member in real if "nll_minus_full" in member.numbers]
    within = [one for one in compared if not higher_nll(one) and not_judged(one) is None]
    if compared:
        found.append(_verdicts(compared, len(within)))
    if within:
        within.sort(key=lambda one: one.held or 0)
        shown = [f"{one.label} in {bytes_text(one, group)}, {_loss(one)}" for one in within[:MOST_METHODS]]
        rest = [one.label for one in within[MOST_METHODS:]]
        more = f"; and {name_list(rest)}" if rest else ""
        found.append(f"Within {MARGIN_TEXT}: {'; '.join(shown)}{more}.")
    smallest = min((one for one in real if one.held), key=lambda one: one.held or 0, default=None)
    if smallest is not None and smallest not in within[:MOST_METHODS]:
        found.append(f"Smallest cache: {smallest.label} in {bytes_text(smallest, group)}{_at_loss(smallest)}.")
    return found + _needles(group, base, real) + _speed(group, real)


def _verdicts(compared: Sequence[MethodNumbers], within: int) -> str:
    """Counts the methods by the verdict on their NLL: within the margin, worse, or why there is none."""
    higher = [one for one in compared if higher_nll(one)]
    reasons = Counter(not_judged(one) for one in compared if not higher_nll(one))
    parts = [f"{len(higher)} worse"] if higher else []
    parts += [f"{count} without a verdict ({reason})" for reason, count in reasons.most_common() if reason]
    count = f"{len(compared)} methods" if len(compared) > 1 else "one method"
    rest = f": {', '.join(parts)}" if parts else ""
    verb = "are" if within > 1 else "is"
    return f"In NLL, of {count} {within or 'none'} {verb} shown within {MARGIN_TEXT} of the full cache{rest}."


def _scope(group: Group, base: MethodNumbers) -> str:
    count, names = len(group.members), len({display_name(one.row) for one in group.members})
    settings = f" in {count} settings" if count > names else ""
    text = f"{names} method{'s' * (names != 1)}{settings} compared with the full cache"
    parts = []
    if (ppl := base.value("ppl")) is not None:
        context = group.contexts["perplexity"]
        parts.append(f"has a perplexity of {number_text.fixed_text(ppl, 2)} after {context:,} tokens")
    if base.held is not None:
        share = base.value("compressible_share")  # None: all of it
        bounded = "" if share is None else f", {number_text.percent(share)} of it in layers that methods can compress"
        unit, form = number_text.in_bytes([base.held])
        parts.append(f"holds {form(base.held)} {unit} at {group.contexts['bytes']:,} tokens{bounded}")
    return f"{text}, which {' and '.join(parts)}." if parts else f"{text}."


def _loss(member: MethodNumbers) -> str:
    return judged_loss(member, member.numbers["nll_minus_full"])


def _at_loss(member: MethodNumbers) -> str:
    return f", {_loss(member)}" if "nll_minus_full" in member.numbers else ""


def _needles(group: Group, base: MethodNumbers, members: Sequence[MethodNumbers]) -> list[str]:
    measured = [one for one in members if "hit_rate" in one.numbers]
    if not group.lengths or not measured:
        return []
    most = base.value("hit_rate") or 0
    equal = [one.label for one in measured if (one.value("hit_rate") or 0) >= most]
    fewer = [one for one in measured if fewer_needles(one, base)]
    found = f"{name_list(equal)} find at least as many" if equal else "every method finds fewer"
    beyond = f", {len(fewer)} of {len(measured)} methods fewer beyond the intervals" if fewer else ""
    return [f"In {group.lengths[-1]:,} tokens the full cache finds {hits_text(base)} needles; {found}{beyond}."]


def _speed(group: Group, members: Sequence[MethodNumbers]) -> list[str]:
    """The fastest method by its ratio to the full cache of the same run: times of other processes differ."""
    timed = [(ratio, one) for one in members if (ratio := one.speed) is not None]
    if not timed:
        return []
    ratio, fastest = min(timed, key=lambda item: item[0])
    own, full = fastest.numbers["tpot_p50_ms"], fastest.full_tpot
    unsteady = [one.label for one in (group.baseline, fastest) if one is not None and one.value("steady") == 0]
    doubt = f" The timing of {' and '.join(unsteady)} was not steady." if unsteady else ""
    against = "" if full is None else f" against {_ms(full)}"
    rest = "" if ratio < 1 else ", so no method is faster than the full cache"
    context = group.contexts.get("latency", 0)
    return [
        f"At {context:,} tokens of context {fastest.label} takes {number_text.fixed_text(ratio, 2)}x the full cache's "
        f"median time per output token ({_ms(own)}{against} in one run), the least of {len(timed)} methods "
        f"that were timed beside it{rest}.{doubt}"
    ]


def _ms(row: Row | None) -> str:
    return "–" if row is None else f"{number_text.significant(row.value or 0)} ms"
