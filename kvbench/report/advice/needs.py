"""The lines of the answer card that choose a method: long chat, long documents, code, and the extreme.

Each line takes the smallest cache whose quality the data show to stay within a stated margin. Where the data show it
for none, the line takes the smallest cache whose measured mean stays within the margin and says `not enough data`;
where there is none either, the smallest loss. Methods that see the future are never taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.report.advice.candidates import NOT_SMALLER, Candidate, Candidates, candidates_on, least_loss, smallest
from kvbench.report.advice.card import CardLine, Mark
from kvbench.report.advice.what_to_run import in_16_bits, on_code, on_needles, on_windows
from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import weights_of
from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.names import knob_text, name_list
from kvbench.report.compare.needle_loss import MARGIN as NEEDLE_MARGIN
from kvbench.report.compare.needle_loss import NeedleLoss
from kvbench.report.compare.texts import is_code, texts_of
from kvbench.report.compare.verdicts import WEIGHTS_REASONS, times_text
from kvbench.report.compare.window_verdicts import WindowEvidence
from kvbench.results.paired import FEWEST_UNITS, MARGIN, Verdict
from kvbench.results.row import Row

EXTREME = 0.1
"""Nats: the loss below which a cache still counts as working."""
CHAT, DOCUMENTS, CODE, EXTREME_NEED = (
    "Long chat",
    "Long documents and retrieval",
    "Code",
    "Extreme: most compression that still works",
)
WhatToRun = Callable[[Group, Row | None, int | None], str]


@dataclass(frozen=True)
class Rule:
    """How a line is decided by its loss. margin: nats. run: the command that measures what is missing."""

    margin: float
    run: WhatToRun = on_windows


def chat(group: Group, evidence: WindowEvidence) -> CardLine:
    """The smallest cache within the margin on prose."""
    texts = texts_of(group.dataset)
    prose = [text for text in texts if not is_code(text)]
    named = "+".join(prose) or "prose"
    line = CardLine("chat", CHAT, group, f"ΔNLL on {named}, within {MARGIN:g} nats; then KL")
    if texts and not prose:
        return line.abstain("only code was scored, no prose", on_windows(group, None, data="data=essays"))
    only = prose if len(prose) < len(texts) else []

    def run(group: Group, row: Row | None, windows: int | None) -> str:
        """All texts again, so that the prose among them gets the windows that it needs."""
        return on_windows(group, row, -(-(windows or 0) * len(texts) // len(prose)) if prose else windows)

    line = _by_loss(line, evidence, group.dataset, only, Rule(MARGIN, run))
    if line.choice is not None and line.choice.traits.bounded is False:
        line.limits.append(f"the cache of {line.setting} grows with the chat")
    return line


def code(group: Group, evidence: WindowEvidence) -> CardLine:
    """The smallest cache within the margin on source code."""
    line = CardLine("code", CODE, group, f"ΔNLL on code, within {MARGIN:g} nats; then KL")
    others = dict.fromkeys(text for member in group.members for text in member.by_text)
    known = [text for text in (group.dataset, *others) if texts_of(text) and all(map(is_code, texts_of(text)))]
    if not known:
        return line.abstain("no code was scored", on_code(group, None))
    line.ranked_by = f"ΔNLL on {known[0]}, within {MARGIN:g} nats; then KL"
    return _by_loss(line, evidence, known[0], [], Rule(MARGIN, on_code))


def extreme(group: Group, evidence: WindowEvidence) -> CardLine:
    """The smallest cache whose loss stays below EXTREME."""
    ranked = f"largest x smaller with ΔNLL below {EXTREME:g} nats at 95%"
    line = CardLine("extreme", EXTREME_NEED, group, ranked)
    return _by_loss(line, evidence, group.dataset, [], Rule(EXTREME))


def documents(group: Group, evidence: WindowEvidence) -> CardLine:
    """The smallest cache that finds as many needles as the full cache; of caches of one size by KL."""
    found = candidates_on(group, evidence, group.dataset)
    known = [(one, one.member.needles) for one in found.found if one.member.needles is not None]
    beyond = any(needles.beyond for _, needles in known)
    # A method without a needle beyond its budget was not tested: its recent tokens hold them all.
    pairs = [(one, needles) for one, needles in known if needles.beyond == beyond]
    apart = " that lay before the newest tokens" if beyond else ""
    ranked = f"needles found{apart}, at most {NEEDLE_MARGIN:.0%} fewer than with the full cache; then KL"
    line = CardLine("documents", DOCUMENTS, group, ranked)
    if (reason := _no_baseline(group)) is not None:
        return line.abstain(reason, on_needles(group, None))
    if not group.lengths:
        return line.abstain("no needle was measured that the full cache itself finds", on_needles(group, None))
    if not pairs:
        return line.abstain(_nothing(found, "no method with needles"), on_needles(group, None))
    return _by_needles(line, found, pairs)


def _by_loss(
    line: CardLine, evidence: WindowEvidence, dataset: str | None, texts: Sequence[str], rule: Rule
) -> CardLine:
    group = line.group
    if (reason := _no_baseline(group)) is not None:
        return line.abstain(reason, rule.run(group, None, None))
    found = candidates_on(group, evidence, dataset, texts, rule.margin)
    known = [one for one in found.found if one.verdict is not None]
    if not known:
        reason = "no method with windows in samples.jsonl" if found.found else "no method"
        command = rule.run(group, None, None)
        return line.abstain(
            _nothing(found, reason), in_16_bits(command, group) if NOT_SMALLER in found.excluded else command
        )
    shown = [one for one in known if one.below]
    likely = [one for one in known if not one.above and one.mean <= rule.margin]
    choice = smallest(shown) or smallest(likely) or least_loss(known)
    if choice is None:
        return line.abstain("no method with a finite loss", rule.run(group, None, None))
    mark = _mark(choice)
    if not shown:
        line.reasons.append(f"no method is shown to lose less than {rule.margin:g} nats")
    _take(line, choice, mark, _loss_text(choice), rule.run)
    _explain(line, found, shown or likely, choice)
    if (needles := choice.member.needles) is not None and needles.worse:
        line.limits.append(f"{line.setting} loses needles: {needles}")
    undecided = [one for one in likely if one not in shown and one is not choice and one.times > choice.times]
    if undecided and shown:
        line.limits.append(f"smaller, but not enough windows: {name_list([_with_needed(one) for one in undecided])}")
    line.limits += _scope(group, dataset, texts, choice.verdict)
    return line


def _mark(choice: Candidate) -> Mark:
    """A loss within MARGIN is tolerable, a loss within a larger margin is marked."""
    loses = choice.verdict is not None and choice.verdict.shows_loss and choice.verdict.high >= MARGIN
    if choice.below:
        return "with loss" if loses else ""
    return "with loss" if choice.above else "not enough data"


def _by_needles(line: CardLine, found: Candidates, pairs: Sequence[tuple[Candidate, NeedleLoss]]) -> CardLine:
    shown = [(one, needles) for one, needles in pairs if needles.within]
    likely = [(one, needles) for one, needles in pairs if not needles.worse and needles.loss <= NEEDLE_MARGIN]
    rest = likely or pairs
    least = min(needles.loss for _, needles in rest)
    pool = shown or [(one, needles) for one, needles in rest if needles.loss == least]
    choice = smallest([one for one, _ in pool])
    if choice is None:
        return line.abstain(_nothing(found, "no method with needles"), on_needles(line.group, None))
    needles = next(needles for one, needles in pool if one is choice)
    line.limits.append(f"needles in prompts of {line.group.lengths[-1]:,} tokens only")
    if not needles.within and not needles.worse:
        more = "" if needles.needed is None else f"; about {needles.needed} needed"
        line.limits.append(f"{needles.own.n} needles do not exclude a loss of {needles.bounds[1]:.0%} of them{more}")
    mark: Mark = "with loss" if needles.worse or choice.above else "" if needles.within else "not enough data"
    cost = f"{needles}, {_loss_text(choice)}"
    _take(line, choice, mark, cost, lambda group, row, _: on_needles(group, row, needles.needed))
    _explain(line, found, [one for one, _ in pool], choice)
    return line


def _take(line: CardLine, choice: Candidate, mark: Mark, cost: str, run: WhatToRun) -> None:
    member, group = choice.member, line.group
    line.choice, line.mark, line.cost = member, mark, cost
    line.budget, line.smaller = budget_text(member), times_text(choice.times)
    line.speed = speed_text(member, group)
    if mark == "not enough data":
        needed = choice.verdict.needed if choice.verdict is not None else None
        line.command = run(group, member.row, needed)


def _explain(line: CardLine, found: Candidates, pool: Sequence[Candidate], choice: Candidate) -> None:
    nearest = min(pool, key=lambda one: one.distance, default=choice)
    if nearest is not choice and nearest.distance < choice.distance:
        text = f"KL {number_text.small(nearest.kl)}" if nearest.kl is not None else _loss_text(nearest)
        line.reasons.append(
            f"nearest to the full cache of {len(pool)} such settings: {nearest.member.label}, {text}, "
            f"{times_text(nearest.times)} smaller"
        )
    if found.excluded_text:
        line.limits.append(f"not considered: {found.excluded_text}")


def _no_baseline(group: Group) -> str | None:
    if (weights := WEIGHTS_REASONS[weights_of(group.row)]) is not None:
        return f"{weights}: quality says nothing"
    if group.baseline is None:
        return "the full cache was not measured, so no method can be compared with it"
    return None


def _nothing(found: Candidates, reason: str) -> str:
    return f"{reason}; excluded: {found.excluded_text}" if found.excluded_text else reason


def _with_needed(one: Candidate) -> str:
    needed = None if one.verdict is None else one.verdict.needed
    return f"{one.member.label} ({'' if needed is None else f'about {needed} windows needed, '}{times_text(one.times)})"


def _loss_text(one: Candidate) -> str:
    """`ΔNLL +0.0015 [-0.0067, +0.0097], KL 0.0032`; without the interval below 10 windows."""
    verdict, parts = one.verdict, []
    if verdict is not None and verdict.n < FEWEST_UNITS and math.isfinite(one.mean):
        parts.append(f"ΔNLL {number_text.signed(one.mean)}")
    elif verdict is not None and math.isfinite(one.mean):
        form = number_text.within(number_text.signed, verdict.low, verdict.high)
        bounds = number_text.interval(form(verdict.mean), form(verdict.low), form(verdict.high))
        parts.append(f"ΔNLL {bounds}")
    if one.kl is not None:
        parts.append(f"KL {number_text.small(one.kl)}")
    return ", ".join(parts) or "loss not measured"


def _scope(group: Group, dataset: str | None, texts: Sequence[str], verdict: Verdict | None) -> list[str]:
    windows = "" if verdict is None else f"{verdict.n} window{'s' * (verdict.n != 1)} "
    context = group.contexts.get("perplexity")
    after = "" if context is None else f" after {context:,} tokens of context"
    needed = "" if verdict is None or verdict.needed is None else f"; {verdict.text()}"
    return [f"{windows}of {'+'.join(texts) or dataset or 'one text'}{after} only{needed}"]


def budget_text(member: MethodNumbers) -> str:
    """`256 tokens`, `25% of the prompt`, `all tokens`"""
    budget = member.row.budget
    if budget is None:
        return "all tokens"
    return f"{knob_text('budget', budget)} {'tokens' if budget >= 1 else 'of the prompt'}"


def speed_text(member: MethodNumbers, group: Group) -> str:
    """Time per output token as a multiple of the full cache's in the same run, with its context."""
    context = group.contexts.get("latency")
    if member.value("tpot_p50_ms") is None or context is None:
        return "not measured"
    if member.speed is None:
        return "full cache timed in another run"
    return f"{number_text.fixed_text(member.speed, 2)}x at {context:,} tokens"
