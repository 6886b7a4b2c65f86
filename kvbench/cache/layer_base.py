"""What transformers asks of a cache layer, answered once for all layers of this package."""

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.counters import Counters


class EngineLayer(CacheLayerMixin):
    """A cache layer that does its own attention; `counters` says how many tokens it has seen and keeps.

    `update` writes new tokens and returns the layer itself in place of keys; the registered attention function
    (`kvbench.cache.attention`) then calls `attend`.
    """

    is_sliding = False

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self.counters = counters
        self.is_initialized = True

    @property
    def seen(self) -> int:
        """Tokens fed so far."""
        return self.counters.seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: memory is allocated when the cache is built."""

    def get_seq_length(self) -> int:
        """Tokens seen, not kept: the position of the next token follows from it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a forward of `query_length` tokens reads, and the offset of the first."""
        return self.counters.kept + query_length, self.counters.evicted

    def get_max_length(self) -> int:
        """-1: there is no largest length."""
        return -1
