"""PyramidKV: SnapKV with more budget for the lower layers."""

from dataclasses import dataclass

from kvbench.cache.rule import is_whole
from kvbench.errors import UserError
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True)
class Pyramid(SnapKV):
    """SnapKV whose budget falls linearly with depth (Cai et al., 2024, arXiv:2406.02069).

    With B the budget, w the window, L layers: hi = 2 (B - w) - (B - w) / beta, at most T - w, and lo = 2 (B - w) - hi;
    layer l keeps w + round(hi - l (hi - lo) / (L - 1)). The mean over layers is B; one layer keeps B.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        if not is_whole(self.beta) or self.beta < 1:
            raise UserError(f"beta={self.beta} for Pyramid; type a whole number of at least 1 (the paper's is 20)")
        super().__post_init__()

    def layer_tokens(self, prompt: int, layer: int, n_layers: int) -> int | None:
        budget: int | None = self.tokens(prompt)
        if budget is None or n_layers == 1 or budget >= prompt:
            return budget
        window, picks = int(self.window), budget - int(self.window)
        highest = min(2 * picks - picks / self.beta, prompt - window)
        lowest = 2 * picks - highest
        return window + round(highest - layer * (highest - lowest) / (n_layers - 1))
