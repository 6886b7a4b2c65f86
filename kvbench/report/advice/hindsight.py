"""Whether keep rules come up to hindsight: KL on the same windows, paired, within one budget and decode mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import config_of, sees_future
from kvbench.report.compare.method_families import family_key
from kvbench.report.compare.names import labels, name_list
from kvbench.report.compare.window_samples import MethodWindows
from kvbench.report.compare.window_verdicts import WindowEvidence
from kvbench.results.method_pairs import holm, pair_p_values
from kvbench.results.paired import FEWEST_UNITS, LEVEL


@dataclass(frozen=True)
class CeilingPair:
    """A keep rule beside hindsight. difference: KL of the rule minus hindsight's, nats; p: Holm-corrected; n: windows.

    p is NaN with fewer than 10 windows.
    """

    ceiling: str
    rule: str
    difference: float
    p: float
    n: int

    @property
    def told_apart(self) -> bool:
        return self.p < 1 - LEVEL


def ceiling_pairs(evidence: WindowEvidence) -> list[CeilingPair]:
    """Every keep rule beside every hindsight of its store, budget, decode mode and windows."""
    names = labels([method.row for method in evidence.windows.values()])
    families: dict[tuple[Any, ...], list[MethodWindows]] = {}
    for method in evidence.windows.values():
        families.setdefault((*family_key(method.row), method.row.store), []).append(method)
    found = []
    for members in families.values():
        for ceiling in (member for member in members if sees_future(member.row)):
            for rule in (member for member in members if not sees_future(member.row)):
                shared = sorted(ceiling.kl.keys() & rule.kl.keys())
                if shared:
                    differences = [[method.kl[window] for window in shared] for method in (rule, ceiling)]
                    labelled = (names[config_of(ceiling.row)], names[config_of(rule.row)])
                    found.append((labelled, np.array(differences)))
    corrected = holm(np.array([float(pair_p_values(each)[0]) for _, each in found]))
    return [
        CeilingPair(*labelled, float((each[0] - each[1]).mean()), float(p), each.shape[1])
        for (labelled, each), p in zip(found, corrected, strict=True)
    ]


def hindsight_findings(evidence: WindowEvidence) -> list[str]:
    """One sentence for each hindsight: which rules it does not beat, and what that says about attention mass."""
    by_ceiling: dict[str, list[CeilingPair]] = {}
    for pair in ceiling_pairs(evidence):
        by_ceiling.setdefault(pair.ceiling, []).append(pair)
    return [_sentence(ceiling, pairs) for ceiling, pairs in by_ceiling.items()]


def _sentence(ceiling: str, pairs: Sequence[CeilingPair]) -> str:
    windows = min(pair.n for pair in pairs)
    if windows < FEWEST_UNITS:
        return (
            f"{ceiling} was compared with {name_list([pair.rule for pair in pairs])} on {windows} windows: fewer than "
            f"{FEWEST_UNITS} windows, no verdict."
        )
    lower = {pair.rule: pair.difference for pair in pairs if pair.told_apart and pair.difference < 0}
    unclear = [pair.rule for pair in pairs if not pair.told_apart]
    if not lower and not unclear:
        rules = name_list([pair.rule for pair in pairs])
        return f"{ceiling} has a lower KL than {rules} (paired over {windows} windows, corrected by Holm)."
    parts = [f"{_listed(lower)} lower KL"] if lower else []
    parts += [f"{name_list(unclear)} cannot be told apart from it in KL"] if unclear else []
    return (
        f"{ceiling} does not beat every rule of its budget (paired over {windows} windows, corrected by Holm): "
        f"{'; '.join(parts)}. The tokens that later tokens attend to most are not the best tokens to keep there."
    )


def _listed(lower: Mapping[str, float]) -> str:
    shown = [f"{rule} by {number_text.small(-difference)} nats" for rule, difference in lower.items()]
    return f"{name_list(shown)}: {'a' if len(shown) == 1 else 'each a'}"
