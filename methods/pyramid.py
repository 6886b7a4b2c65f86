"""PyramidKV: SnapKV with more budget for the lower layers."""

from dataclasses import dataclass

from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True)
class Pyramid(SnapKV):
    """SnapKV whose budget falls linearly with depth (Cai et al., 2024, arXiv:2406.02069).

    With B the budget, w the window, L layers: lo = (B - w) / beta, hi = 2 (B - w) - lo, at most T - w; layer l keeps
    w + round(hi - l (hi - lo) / (L - 1)). The mean over layers is B while nothing is capped; one layer keeps B.
    """

    beta: int = 20

    def layer_tokens(self, prompt: int, layer: int, n_layers: int) -> int | None:
        budget: int | None = self.tokens(prompt)
        if budget is None or n_layers == 1:
            return budget
        lowest = (budget - self.window) / self.beta
        highest = 2 * (budget - self.window) - lowest
        share = highest - layer * (highest - lowest) / (n_layers - 1)
        picks: int = max(1, round(min(share, max(1, prompt - self.window))))
        return picks + int(self.window)
