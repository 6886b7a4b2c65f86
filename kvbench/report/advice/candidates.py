"""The methods that may answer a need, with the loss on the texts and the needles that the need is about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvbench.report.compare.comparison import sees_future
from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.names import SEES_FUTURE
from kvbench.report.compare.window_verdicts import WindowEvidence
from kvbench.results.paired import FEWEST_UNITS, MARGIN, Verdict

NOT_SMALLER = "not smaller than a full cache in 16 bits"
ALIKE = 1.1
"""Caches within this ratio in bytes count as equally small; the KL decides between them."""


@dataclass(frozen=True)
class Candidate:
    """A method for a need. times: smaller than a full cache in 16 bits. verdict, kl: on the texts of the need, at the
    margin of the need."""

    member: MethodNumbers
    times: float
    verdict: Verdict | None = None
    kl: float | None = None

    @property
    def mean(self) -> float:
        """Mean ΔNLL over windows, nats; infinite where it is unknown."""
        known = self.verdict is not None and math.isfinite(self.verdict.mean)
        return self.verdict.mean if known and self.verdict is not None else math.inf

    @property
    def distance(self) -> float:
        """Nats from the full cache: KL, else the loss."""
        return self.mean if self.kl is None else self.kl

    @property
    def below(self) -> bool:
        """The windows show that the loss stays below the margin of the need."""
        return self.verdict is not None and self.verdict.kind == "within_margin"

    @property
    def above(self) -> bool:
        """The windows show a loss, and it may exceed the margin of the need."""
        return self.verdict is not None and self.verdict.kind == "worse"


@dataclass
class Candidates:
    """found: the methods that may be chosen. excluded: labels of the others by reason."""

    found: list[Candidate] = field(default_factory=list)
    excluded: dict[str, list[str]] = field(default_factory=dict)

    @property
    def excluded_text(self) -> str:
        """`saves no memory (3), needs retraining (1)`; empty where none is excluded."""
        counts = Counter({reason: len(labels) for reason, labels in self.excluded.items()})
        return ", ".join(f"{reason} ({count})" for reason, count in counts.most_common())


def candidates_on(
    group: Group, evidence: WindowEvidence, dataset: str | None, texts: Collection[str] = (), margin: float = MARGIN
) -> Candidates:
    """The methods of a group with their loss on a data set.

    dataset: the group's own, or one of `by_text`. texts: some of its texts, empty stands for all. margin: nats.
    """
    result = Candidates()
    for member in group.members:
        numbers = member.numbers if dataset == group.dataset else member.by_text.get(dataset or "", {})
        loss, kl_row = numbers.get("nll_minus_full"), numbers.get("kl")
        verdict = None if loss is None else evidence.verdict_on(loss, texts, margin)
        reason = _unsuited(member, group) or _unusable(verdict)
        if reason is not None:
            result.excluded.setdefault(reason, []).append(member.label)
            continue
        kl = None if kl_row is None else evidence.kl_on(kl_row, texts) if texts else kl_row.value
        result.found.append(Candidate(member, group.times_smaller_16(member) or 0.0, verdict, kl))
    return result


def _unsuited(member: MethodNumbers, group: Group) -> str | None:
    engaged, times = member.numbers.get("engaged"), group.times_smaller_16(member)
    if sees_future(member.row):
        return SEES_FUTURE
    if member.traits.retraining:
        return "needs retraining"
    if engaged is not None and not engaged.value:
        return "never evicted or quantised anything"
    if times is None:
        return "bytes of its scored cache not measured"
    return None if times > 1 else NOT_SMALLER


def _unusable(verdict: Verdict | None) -> str | None:
    if verdict is None:
        return None
    if not math.isfinite(verdict.mean):
        return "some windows without a finite loss"
    if verdict.n >= FEWEST_UNITS and verdict.high < 0:
        return "scores better than the full cache over its windows: look for a fault first"
    return None


def smallest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The smallest cache; of caches within ALIKE of it the one closest to the full cache."""
    most = max((one.times for one in candidates), default=0.0)
    near = [one for one in candidates if one.times * ALIKE >= most]
    return min(near, key=lambda one: (one.distance, -one.times), default=None)


def least_loss(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the smallest mean loss, then the smallest KL."""
    known = [one for one in candidates if math.isfinite(one.mean)]
    return min(known, key=lambda one: (one.mean, one.distance), default=None)
