"""Did a method keep up with the full cache? And the numbers of a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.report import units
from kvbench.report.candidates import Candidate, Group
from kvbench.report.names import RANDOM, REPEATED, TRAINED, weights_of
from kvbench.results.row import Row

WIDEST_LOSS = 0.05  # nats a token: an interval that ends above it holds zero only because it is wide
FEWEST_NEEDLES = 10
MOST_NAMES = 6


@dataclass
class Advice:
    """What the rows support in one scenario. choice None: nothing, and `reasons` says why."""

    key: str
    title: str
    need: str
    group: Group
    choice: Candidate | None = None
    runner_up: Candidate | None = None
    answer: str | None = None  # where the choice is no method: an architecture
    reasons: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    too_little: bool = False

    def silent(self, why: str) -> Advice:
        """The advice not to decide yet."""
        self.too_little = True
        self.reasons.append(why)
        return self

    @property
    def headline(self) -> str:
        """The name that stands for the advice."""
        if self.choice is not None:
            return self.choice.label
        return self.answer or ("too little data" if self.too_little else "no method without a measured loss")


def advised(advice: Sequence[Advice]) -> list[Group]:
    """The groups that got advice of their own, each once."""
    return list({id(one.group): one.group for one in advice if one.key != "architecture"}.values())


def losses(member: Candidate, base: Candidate) -> list[str]:
    """Where a method is worse than the full cache beyond the interval."""
    found = []
    loss = member.numbers.get("nll_minus_full")
    if loss is not None and loss.low is not None and loss.low > 0:
        found.append(f"ΔNLL {loss_text(loss)}")
    for length, row in member.hits.items():
        full = base.hits.get(length)
        if full is not None and None not in (row.high, full.low) and row.high < full.low:  # type: ignore[operator]
            found.append(f"{_hits(row)} needles at {length:,} tokens against {_hits(full)}")
    return found


def unproven(member: Candidate, base: Candidate, *, needle: bool = False) -> str | None:
    """Why the rows do not show that a method kept up; None if they do, given that it has no `losses`."""
    loss, engaged = member.numbers.get("nll_minus_full"), member.numbers.get("engaged")
    weights = weights_of(member.row)
    if weights == REPEATED:
        return "heads repeated, for a larger cache than the model's own"
    if weights != TRAINED:
        return "random weights" if weights == RANDOM else f"{weights}, and not trained so"
    if member.held is None:
        return "its memory was not measured at the same context"
    if loss is None or loss.value is None:
        return "its loss against the full cache was not measured"
    if engaged is not None and not engaged.value:
        return "it never engaged"
    if loss.low is None or loss.high is None:
        return "its loss has no interval"
    if loss.high < 0:
        return "better than the full cache beyond the interval, which needs a look first"
    if loss.high > WIDEST_LOSS:
        return f"its loss is not known to better than {WIDEST_LOSS:g} nats"
    if needle:
        hits = member.numbers.get("hit_rate")
        if hits is None:
            return "its needles were not measured at the longest length"
        if (hits.n or 0) < FEWEST_NEEDLES:
            return f"fewer than {FEWEST_NEEDLES} needles were hidden"
    return None


def loss_text(row: Row) -> str:
    """`+0.0104 [+0.0012, +0.0203]`"""
    if row.value is None:
        return "–"
    form = units.within(units.signed, row.low, row.high)
    if row.low is None or row.high is None:
        return form(row.value)
    return units.interval(form(row.value), form(row.low), form(row.high))


def bytes_text(member: Candidate, group: Group) -> str:
    """`13.2 MiB (3.8x less)`"""
    if member.held is None:
        return "–"
    unit, form = units.in_bytes([member.held])
    ratio = group.ratio(member)
    return f"{form(member.held)} {unit}" + (f" ({ratio:.1f}x less)" if ratio else "")


def hits_text(member: Candidate | None) -> str:
    """Hits over needles at the longest length."""
    row = member.numbers.get("hit_rate") if member is not None else None
    return "–" if row is None else _hits(row)


def _hits(row: Row) -> str:
    return f"{(row.value or 0) * (row.n or 0):.10g}/{row.n}"


def numbers_of(member: Candidate, group: Group) -> str:
    """The numbers behind a choice, in one line."""
    parts = [f"holds {bytes_text(member, group)}"]
    context = group.contexts.get("memory") or group.contexts.get("perplexity")
    if context:
        parts[0] += f" at {context:,} tokens"
    if (loss := member.numbers.get("nll_minus_full")) is not None:
        parts.append(f"ΔNLL {loss_text(loss)}")
    if (kl := member.value("kl")) is not None:
        parts.append(f"KL {units.small(kl)}")
    if "hit_rate" in member.numbers:
        parts.append(f"needles {hits_text(member)}")
    tpot, base = member.value("tpot_p50_ms"), group.baseline.value("tpot_p50_ms") if group.baseline else None
    if tpot is not None and base is not None:
        parts.append(f"TPOT {units.significant(tpot)} ms (full {units.significant(base)})")
    return ", ".join(parts)


def name_list(labels: Sequence[str]) -> str:
    """`a, b, c and 4 more`"""
    shown = ", ".join(labels[:MOST_NAMES])
    return shown if len(labels) <= MOST_NAMES else f"{shown} and {len(labels) - MOST_NAMES} more"
