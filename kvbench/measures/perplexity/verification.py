"""Perplexity, verified: windows listed, rows recomputed from the windows' means, batches of windows scored again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.measures.context import RunContext
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.perplexity.rows import rows_of, window_records
from kvbench.measures.perplexity.token_scores import COMPARED, Scores
from kvbench.measures.perplexity.windows import score_batch
from kvbench.measures.verification import Remeasured, Scored
from kvbench.results.row import Row, flags_of

OF_TOKENS = ("worse_share", "nll_minus_full_worst_decile")
"""Metrics over blocks of tokens where windows are few: means of windows do not determine them then."""
OF_CACHES = (
    "engaged",
    "kept_tokens",
    "positions_processed",
    "held_bytes",
    "scored_kept_tokens",
    "scored_bytes",
    "x_smaller",
)


@dataclass(frozen=True)
class WindowVerification:
    """The windows of one setting of perplexity. See `kvbench.measures.verification.Verification`."""

    settings: Perplexity
    unit: str = "window"

    @property
    def columns(self) -> dict[str, Any]:
        return {"protocol": self.settings.protocol_name}

    def records(self, context: RunContext) -> list[dict[str, Any]]:
        return window_records(context, self.settings)

    def batches(self, context: RunContext) -> list[list[int]]:
        numbers = list(range(len(self.settings.offsets(context.lengths))))
        return [numbers[start : start + self.settings.batch] for start in range(0, len(numbers), self.settings.batch)]

    def rows(self, context: RunContext, scores: Sequence[Scored]) -> list[Row]:
        """Each window's mean stands in for each of its tokens: means and intervals over windows are the same."""
        tokens = self.settings.tokens
        found = {}
        for method in context.methods:
            mine = [one[method.label] for one in scores]
            names = [name for name in ("nll", *COMPARED) if all(name in of_window for of_window in mine)]
            columns = {
                name: [torch.tensor([_number(one[name]) for one in mine], dtype=torch.float64).view(-1, 1)]
                for name in names
            }
            expanded = {name: [column.expand(-1, tokens).contiguous()] for name, (column,) in columns.items()}
            expanded["engaged"] = [torch.zeros(len(mine), tokens)]
            found[method.label] = Scores(
                expanded, [0.0], [0.0], [0], scored_kept=[1.0], scored_held=[0.0], full_16bit=[0.0]
            )
        rows = [row for method in context.methods for row in rows_of(method, found, context, self.settings)]
        return [told for row in rows if (told := _determined(row)) is not None]

    def again(self, context: RunContext, numbers: Sequence[int]) -> Remeasured:
        """Score the windows again. `held` is left out for a last batch that is smaller: no row speaks of it."""
        offsets = self.settings.offsets(context.lengths)
        scores = score_batch(context, self.settings, [offsets[number] for number in numbers])
        done = context.remaining("perplexity")
        found = Remeasured()
        for i, number in enumerate(numbers):
            found.scores[number] = {
                method.label: {name: scores[method.label].of_window(name, i) for name in ("nll", *COMPARED)}
                for method in done
            }
        if len(numbers) == min(self.settings.batch, len(offsets)):
            found.held.update({method.label: _held(scores[method.label]) for method in done})
        return found


def _determined(row: Row) -> Row | None:
    """What means of windows tell of a row: nothing of caches and positions; of few windows, whose intervals are drawn
    over blocks of tokens, the value alone."""
    if row.position is not None or row.metric in OF_CACHES:
        return None
    if "few_windows" not in flags_of(row):
        return row
    return None if row.metric in OF_TOKENS else replace(row, low=None, high=None)


def _held(mine: Scores) -> dict[str, float]:
    """What the caches of one batch held, by metric."""
    return {
        "kept_tokens": mine.kept[0],
        "positions_processed": float(mine.processed[0]),
        "held_bytes": mine.held[0],
        "scored_kept_tokens": mine.scored_kept[0],
        "scored_bytes": mine.scored_held[0],
    }


def _number(value: float | None) -> float:
    """A number of samples.jsonl, which writes nan as null."""
    return math.nan if value is None else float(value)
