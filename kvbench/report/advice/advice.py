"""Advice for one need: a method or an architecture, the numbers behind it, and what the data cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.window_verdicts import MARGIN_TEXT


@dataclass
class Advice:
    """What the data support for one need. choice None: nothing, `reasons` says why. answer: an architecture."""

    key: str
    title: str
    need: str
    group: Group
    choice: MethodNumbers | None = None
    runner_up: MethodNumbers | None = None
    answer: str | None = None
    reasons: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    too_little: bool = False

    def abstain(self, reason: str) -> Advice:
        """The same advice without a choice, because the data do not suffice."""
        self.too_little = True
        self.reasons.append(reason)
        return self

    @property
    def headline(self) -> str:
        """The chosen method or architecture, or that there is none."""
        if self.choice is not None:
            return self.choice.label
        return self.answer or ("not enough data" if self.too_little else f"no method shown within {MARGIN_TEXT}")


def advised_groups(advice: Sequence[Advice]) -> list[Group]:
    """The groups that the advice on methods is about, each once."""
    return list({id(one.group): one.group for one in advice if one.key != "architecture"}.values())
