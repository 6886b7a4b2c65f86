"""The answer card of a report: five needs for each model that was measured, and what reading cannot tell from data."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.advice.architecture import new_model
from kvbench.report.advice.card import FACTS, AnswerCard
from kvbench.report.advice.needs import chat, code, documents, extreme
from kvbench.report.compare.comparison import weights_of
from kvbench.report.compare.methods import Group, group_name
from kvbench.report.compare.window_verdicts import NO_EVIDENCE, WindowEvidence

MOST_GROUPS = 4
"""Models and devices that get lines of their own."""


def answer_card(groups: Sequence[Group], evidence: WindowEvidence = NO_EVIDENCE) -> AnswerCard | None:
    """The card; None without a group.

    Lines are given for models with trained weights, those with most methods first; where there is none, for the first
    group, and its lines say what to run. The line for a new model compares all groups and stands once.
    """
    if not groups:
        return None
    trained = [group for group in groups if weights_of(group.row) == "trained"] or list(groups[:1])
    shown = sorted(trained, key=lambda group: -len(group.members))[:MOST_GROUPS]
    sections = []
    for place, group in enumerate(shown):
        lines = [need(group, evidence) for need in (chat, documents, code)]
        lines += [new_model(groups, evidence)] if place == 0 else []
        name = group_name(group, groups) if len(shown) > 1 else ""
        sections.append((name, [*lines, extreme(group, evidence)]))
    return AnswerCard(sections, FACTS)
