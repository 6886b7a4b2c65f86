"""The result of a run in plain sentences, which close the output in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import sees_future
from kvbench.report.compare.methods import Group, MethodNumbers, group_name
from kvbench.report.compare.names import display_name, knob_text
from kvbench.results.paired import FEWEST_UNITS

MOST_METHODS = 4
"""Of more methods with one number of kept tokens, only the one with the lowest loss is named, none that sees the
future."""
MOST_SENTENCES = 6
VERDICTS = {"worse": "worse", "within_margin": "within margin", "not_enough_data": "no verdict"}


def closing_sentences(groups: Sequence[Group]) -> list[str]:
    """For each number of kept tokens how many times smaller than in 16 bits the methods are, and what they lose."""
    found = []
    for group in groups:
        where = f"{name}: " if len(groups) > 1 and (name := group_name(group, groups)) else ""
        found += [f"{where}{sentence}" for sentence in _of_group(group)]
    more = len(found) - MOST_SENTENCES
    return found if more <= 0 else [*found[:MOST_SENTENCES], f"... and {more} more budgets in the report."]


def _of_group(group: Group) -> Iterator[str]:
    budgets: dict[str, list[MethodNumbers]] = {}
    for member in sorted(group.members, key=_order):
        if (member.value("x_smaller") or 0) > 0:
            budgets.setdefault(_kept(member), []).append(member)
    for kept, members in budgets.items():
        yield f"{kept}: {_methods(members)}{_windows(members)}."


def _order(member: MethodNumbers) -> tuple[bool, float]:
    """Without a budget first, then tokens in ascending order, then shares of the prompt."""
    budget = member.row.budget or 0.0
    return 0 < budget < 1, budget


def _kept(member: MethodNumbers) -> str:
    budget = member.row.budget
    if budget is None:
        return "All tokens kept"
    text = knob_text("budget", budget)
    return f"{text} kept tokens" if budget >= 1 else f"{text} of the tokens kept"


def _methods(members: Sequence[MethodNumbers]) -> str:
    members = [member for member in members if not sees_future(member.row)] or members
    measured = [member for member in members if member.value("nll_minus_full") is not None]
    if len(members) > MOST_METHODS and measured:
        least = min(measured, key=lambda member: member.value("nll_minus_full") or 0.0)
        return f"the lowest loss of {len(members)} methods: {_one(least, display_name(least.row))}"
    shown = [display_name(member.row) for member in members]
    names = shown if len(set(shown)) == len(shown) else [member.label for member in members]
    named = list(zip(members, names, strict=True))[:MOST_METHODS]
    return ", ".join([_one(*named[0]), *(_one(*pair, short=True) for pair in named[1:])])


def _one(member: MethodNumbers, name: str, *, short: bool = False) -> str:
    """`h2o is 3.2x smaller than a 16-bit full cache at +0.050 nats a token (worse)`.

    short: `h2o 3.2x smaller at +0.050 nats (worse)`.
    """
    times, loss = member.value("x_smaller") or 0.0, member.value("nll_minus_full")
    size = f"{number_text.significant(max(times, 1 / times), 2)}x {'smaller' if times >= 1 else 'larger'}"
    reference = "" if short else " than a 16-bit full cache"
    if size.startswith("1.0x"):
        size, reference = "as large", "" if short else " as a 16-bit full cache"
    cost = "" if loss is None else f" at {_signed(loss)} nats{'' if short else ' a token'}"
    verdict = member.verdict
    judged = "" if verdict is None or verdict.n < FEWEST_UNITS else f" ({VERDICTS[verdict.kind]})"
    return f"{name} {'' if short else 'is '}{size}{reference}{cost}{judged}"


def _signed(loss: float) -> str:
    return ("+" if loss > 0 else "") + number_text.significant(loss, 2)


def _windows(members: Sequence[MethodNumbers]) -> str:
    counts = {verdict.n for member in members if (verdict := member.verdict) is not None}
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    text = f"{least} window{'s' * (least != 1)}" if least == most else f"{least} to {most} windows"
    doubt = f", fewer than {FEWEST_UNITS}: no verdict" if least < FEWEST_UNITS else ""
    return f"; {text}{doubt}"
