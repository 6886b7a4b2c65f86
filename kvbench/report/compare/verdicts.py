"""Whether a method is worse than the full cache, whether the data can show it, and the numbers behind it as text."""

from __future__ import annotations

import math

from kvbench.report.compare import number_text
from kvbench.report.compare.comparison import weights_of
from kvbench.report.compare.methods import Group, MethodNumbers
from kvbench.report.compare.window_verdicts import MARGIN_TEXT, NO_SAMPLES
from kvbench.results.paired import FEWEST_UNITS, Verdict
from kvbench.results.row import Row

WEIGHTS_WORDS = {"trained": "trained", "repeated": "heads repeated", "pooled": "heads mean-pooled", "random": "random"}
"""Where a model's weights come from, as tables show it."""
WEIGHTS_REASONS = {
    "trained": None,
    "repeated": "heads repeated: the same logits from a larger cache than the model's own",
    "pooled": "heads mean-pooled without training",
    "random": "random weights",
}
"""Why the quality of such a model is not judged."""


def higher_nll(member: MethodNumbers) -> list[str]:
    """The verdict, if it is `worse`."""
    verdict = member.verdict
    return [f"NLL {verdict.text()}"] if verdict is not None and verdict.kind == "worse" else []


def fewer_needles(member: MethodNumbers, base: MethodNumbers) -> list[str]:
    """The hits at each length where the interval of the hit rate lies below the full cache's."""
    found = []
    for length, row in member.hits.items():
        full = base.hits.get(length)
        if full is not None and None not in (row.high, full.low) and row.high < full.low:  # type: ignore[operator]
            found.append(f"{hits_of_row(row)} needles at {length:,} tokens against {hits_of_row(full)}")
    return found


def not_judged(member: MethodNumbers) -> str | None:
    """Why the NLL of a method that is not worse is not shown within the margin of the full cache; None if it is."""
    loss, engaged = member.numbers.get("nll_minus_full"), member.numbers.get("engaged")
    if (reason := WEIGHTS_REASONS[weights_of(member.row)]) is not None:
        return reason
    if loss is None or loss.value is None:
        return "its loss against the full cache was not measured"
    if engaged is not None and not engaged.value:
        return "it never evicted or quantised anything"
    return _no_verdict(member.verdict)


def _no_verdict(verdict: Verdict | None) -> str | None:
    if verdict is None:
        return NO_SAMPLES
    if verdict.kind == "not_enough_data" and verdict.needed is None:
        return verdict.text()
    if verdict.n < FEWEST_UNITS:
        windows = f"{verdict.n} window{'s' * (verdict.n != 1)}"
        return f"{windows} measured, a verdict needs {FEWEST_UNITS} or more: type perplexity.windows=32"
    if verdict.high < 0:
        return "it scores better than the full cache over its windows: look for a fault first"
    if verdict.kind == "not_enough_data":
        return f"its windows show neither a loss nor that the loss stays below {MARGIN_TEXT}"
    return None


def loss_text(row: Row) -> str:
    """`+0.0104 [+0.0012, +0.0203]`"""
    if row.value is None:
        return "–"
    form = number_text.within(number_text.signed, row.low, row.high)
    if row.low is None or row.high is None:
        return form(row.value)
    return number_text.interval(form(row.value), form(row.low), form(row.high))


def judged_loss(member: MethodNumbers, loss: Row) -> str:
    """`ΔNLL +0.0104, worse by 0.01 nats (16 windows; ...)`; the row's own interval where the windows are unknown."""
    verdict = member.verdict
    if verdict is None or not math.isfinite(verdict.mean):
        return f"ΔNLL {loss_text(loss)}, no verdict without samples"
    return f"ΔNLL {number_text.signed(verdict.mean)}, {verdict.text()}"


def bytes_text(member: MethodNumbers, group: Group) -> str:
    """`13.2 MiB (1.90x smaller than 16-bit)`: than a full cache in 16 bits."""
    if member.held is None:
        return "–"
    unit, form = number_text.in_bytes([member.held])
    times = group.times_smaller_16(member)
    return f"{form(member.held)} {unit}" + (f" ({times_text(times)} smaller than 16-bit)" if times else "")


def times_text(times: float) -> str:
    """`3.81x`"""
    return f"{number_text.fixed_text(times, 2)}x"


def hits_text(member: MethodNumbers | None) -> str:
    """Hits over needles at the longest length."""
    row = member.numbers.get("hit_rate") if member is not None else None
    return "–" if row is None else hits_of_row(row)


def hits_of_row(row: Row) -> str:
    """`11/12` from a hit rate."""
    return f"{(row.value or 0) * (row.n or 0):.10g}/{row.n}"
