"""Ask the full cache first: a task that it cannot do says nothing about compression and can be left out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvbench.measures.context import MethodRun, RunContext


def ask_baseline_first(
    context: RunContext,
    /,  # `where` may hold a column of the same name
    ask: Callable[[RunContext], None],
    scores: Callable[[MethodRun], Sequence[float]],
    skip_below: float | None,
    measure: str,
    task: str,
    **where: Any,
) -> Sequence[MethodRun]:
    """Ask the full cache alone, then the others, unless its mean score is below `skip_below`; returns who was asked.

    ask: asks all methods of a context. scores: a method's answers so far. skip_below: None asks all together. task: for
    messages. where: columns of the row that a failure leaves.
    """
    if skip_below is None:
        ask(context)
        return context.methods
    baseline = context.baseline
    ask(replace(context, methods=[baseline]))
    others = [method for method in context.methods if method is not baseline]
    complete, found = not context.has_failed(baseline, measure, **where), scores(baseline)
    if others and complete and sum(found) / len(found) < skip_below:
        why = f"the full cache's hit rate is {sum(found) / len(found):.2f}, below {measure}.skip_below"
        context.progress.say(f"{measure} {task}: {why}={skip_below}; other methods skipped")
        context.journal.skipped.update({method.label: why for method in others})
        return [baseline]
    if others:
        ask(replace(context, methods=others))
    return context.methods
