"""Gap closed: where a keep rule stands between random eviction (floor) and hindsight (ceiling) at equal kept tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.perplexity.token_scores import Scores
from kvbench.measures.statistics import bounds
from kvbench.results.gap_closed import gap_closed
from kvbench.results.row import Row

FLOOR, CEILING = "random", "hindsight"
"""Methods of these names are the bounds, as their yaml files name them."""

SAME_TOKENS = 0.01
"""Largest difference in kept tokens, as a share, at which two caches count as equally large."""


def bounds_of(method: MethodRun, methods: Sequence[MethodRun]) -> tuple[MethodRun, MethodRun] | None:
    """Floor and ceiling for a keep rule: of the same budget, store and way of decoding. None where one is missing.

    The floor reads prompts in the same chunks; the ceiling always reads them in one piece. None for methods without a
    budget, and for the bounds themselves.
    """
    if method.method.rule.budget is None or method.row.method in (FLOOR, CEILING):
        return None
    found = [next((one for one in methods if _is_bound(one, name, method)), None) for name in (FLOOR, CEILING)]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def gap_rows(
    base: Row, method: MethodRun, context: RunContext, scores: dict[str, Scores], windows: Sequence[int]
) -> Iterator[Row]:
    """Rows gap_closed_nll and gap_closed_kl over the windows; the unit of the interval is the window.

    A share: 0 as random eviction, 1 as hindsight. No row where floor and ceiling cannot be told apart.
    """
    pair = bounds_of(method, context.methods)
    if pair is None:
        return
    three = [scores[each.label] for each in (pair[0], method, pair[1])]
    if not _keep_the_same(three):
        return
    for metric in ("nll", "kl"):
        columns = [each.of(metric) if metric in each.columns else None for each in three]
        # A bound that failed in a later batch has fewer windows.
        if any(column is None or len(column) <= max(windows) for column in columns):
            continue
        low, rule, high = (column[list(windows)].double().mean(-1).numpy() for column in columns if column is not None)
        found = gap_closed(low, rule, high, context.seed)
        if found.value is not None:
            yield replace(
                base,
                metric=f"gap_closed_{metric}",
                value=found.value,
                unit="share",
                n=found.n,
                note=f"{base.note}; 0: as {FLOOR}, 1: as {CEILING}, at the same kept tokens",
                **bounds(None if found.low is None or found.high is None else (found.low, found.high)),
            )


def _is_bound(one: MethodRun, name: str, method: MethodRun) -> bool:
    mine, theirs = method.method.rule, one.method.rule
    return (
        one.row.method == name
        and one.row.store == method.row.store
        and theirs.budget == mine.budget
        and theirs.holds_budget == mine.holds_budget
        and (name == CEILING or one.row.prefill_chunk == method.row.prefill_chunk)
    )


def _keep_the_same(three: Sequence[Scores]) -> bool:
    """Whether floor, rule and ceiling held equally many tokens while scored: as many as the rule."""
    kept = [each.mean_kept for each in three if each.mean_kept is not None]
    return len(kept) == len(three) and all(abs(tokens - kept[1]) <= SAME_TOKENS * kept[1] for tokens in kept)
