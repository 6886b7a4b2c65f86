"""What a measure offers to `python -m kvbench.verify`: its samples listed, its rows from samples, a batch run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.results.row import Row

if TYPE_CHECKING:
    from kvbench.measures.context import RunContext

Scored = Mapping[str, Mapping[str, Any]]
"""Of one sample: for each method's label what samples.jsonl records of it, as {"nll": 2.9, "kl": 0.01}."""


@dataclass(frozen=True)
class Remeasured:
    """One batch of samples, measured again.

    scores: for each sample's number and each method's label what samples.jsonl records. held: for each label the
    metrics that tell what its cache held, {"held_bytes": 1e6}.
    """

    scores: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    held: dict[str, dict[str, float]] = field(default_factory=dict)


class Verification(Protocol):
    """The samples of one cell of a measure, in the order in which samples.jsonl lists them."""

    @property
    def columns(self) -> dict[str, Any]:
        """Columns that the cell's rows share, and no other cell's: {"context": 1024}."""

    @property
    def unit(self) -> str:
        """What a sample is: window or prompt."""

    def records(self, context: RunContext) -> list[dict[str, Any]]:
        """What samples.jsonl must say of each sample, without the methods' scores."""

    def batches(self, context: RunContext) -> list[list[int]]:
        """Numbers of the samples that ran together: a batch of another size rounds otherwise."""

    def rows(self, context: RunContext, scores: Sequence[Scored]) -> list[Row]:
        """The rows that scores of all samples determine; `low` and `high` are None where they do not determine them.

        Scores of other names than samples.jsonl records are not needed. `context.methods` are the methods scored.
        """

    def again(self, context: RunContext, numbers: Sequence[int]) -> Remeasured:
        """Measure one batch of `batches` again, with the methods of the context."""
