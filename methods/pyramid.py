"""PyramidKV: SnapKV with more budget for the lower layers."""

from dataclasses import dataclass

from kvbench.cache.rule_settings import whole
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True)
class Pyramid(SnapKV):
    """SnapKV whose budget falls linearly with depth (Cai et al., 2024, arXiv:2406.02069).

    With B the budget, w the protected tokens (the window), L layers: hi = 2 (B - w) - (B - w) / beta, at most T - w,
    and lo = 2 (B - w) - hi; layer l keeps w + round(hi - l (hi - lo) / (L - 1)). The mean over layers is B; with one
    layer, that layer keeps B. The authors' repository differs: its window is 8, integer division gives it 266 tokens
    where 256 are asked for, and below T = 2 (B - w) it gives all layers the same.
    """

    beta: int = whole(20, least=1)

    def layer_tokens(self, prompt: int, layer: int, n_layers: int) -> int | None:
        budget: int | None = self.tokens(prompt)
        if budget is None or n_layers == 1 or budget >= prompt:
            return budget
        protected: int = self.first_tokens + self.last_tokens(budget)
        picks = budget - protected
        highest = min(2 * picks - picks / self.beta, prompt - protected)
        lowest = 2 * picks - highest
        return protected + round(highest - layer * (highest - lowest) / (n_layers - 1))
