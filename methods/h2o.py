"""H2O: heavy hitters plus recent tokens."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.cache.observe import ColumnSums, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import choice, whole
from kvbench.kernels.prefill import Combine, combine_heads


@dataclass(frozen=True)
class H2O(KeepRule):
    """Keeps heavy hitters and recent tokens (Zhang et al., 2023, arXiv:2306.14048).

    Each KV head keeps the `recent` newest tokens, and the tokens with the largest attention mass received so far
    (heavy hitters) with the rest of the budget. `recent` is half the budget unless given. The mass is summed in
    float32 over all prefill queries and then over each decode step; a kept token keeps its sum. The query heads of a
    KV head are summed. With combine="max" the largest head's probability is summed instead; KVCache-Factory takes the
    largest head's sum, which is another order.
    """

    recent: int | None = whole(None, least=1, knob="window", protects="last")
    combine: Combine = choice("sum", "max", knob="variant")

    reads_attention = True
    recent_half = True
    pick = "one heavy hitter"

    def observations(self) -> tuple[Observation, ...]:
        return (ColumnSums(self.combine),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return record.observed[ColumnSums(self.combine)]

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return scores + combine_heads(probabilities, self.combine).sum(-2)
