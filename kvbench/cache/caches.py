"""What a method carries through decode: a compressed cache, or with `recompute` the ids so far."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.cache.layer import SlotLayer
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rule import SlidingWindow
from kvbench.cache.state import StateLayer, in_model_order
from kvbench.cache.stock import StockCache
from kvbench.cache.store import Buffer
from kvbench.errors import UserError

Layer = SlotLayer | RaggedLayer
"""A layer's cache: all heads keep equally many tokens, or each its own number."""


class KVCache(Cache):
    """A compressed cache, ready to decode after its prompt.

    last_logits: [B, V], what the model predicts after the prompt. positions_processed: token positions of a row that
    were run through the model for this cache, the prompt's first. compress_ms: wall time of building it.
    attention_layers: those with keys and values. states: those that keep a state of fixed size. layers: both, as the
    model counts them.
    """

    layers: list[Layer | StateLayer]

    def __init__(
        self, layers: list[Layer], last_logits: Tensor, prompt_tokens: int, states: Sequence[StateLayer] = ()
    ) -> None:
        super().__init__(layers=in_model_order(layers, states))
        self.attention_layers, self.states = layers, states
        self.last_logits = last_logits
        self.prompt_tokens = prompt_tokens
        self.positions_processed = prompt_tokens
        self.compress_ms = 0.0

    @property
    def kernel_name(self) -> str:
        """What decode attention runs on."""
        return self.attention_layers[0].kernel.name

    @property
    def seen(self) -> int:
        """Tokens of a row so far, its prompt's included."""
        return self.attention_layers[0].seen

    @property
    def has_compressed(self) -> bool:
        """Whether any layer has evicted or quantised a token."""
        return any(layer.has_compressed for layer in self.compressible)

    @property
    def compressible(self) -> list[Layer]:
        """The layers that the method applies to; those with a window or a state are bounded already."""
        return [layer for layer in self.attention_layers if not isinstance(layer.rule, SlidingWindow)]

    @property
    def kept_tokens(self) -> float:
        """Tokens held per KV head now, the mean over compressible layers."""
        layers = self.compressible or self.attention_layers
        return sum(layer.kept for layer in layers) / len(layers)

    def check_room(self, ids: Tensor) -> None:
        """Raise UserError unless ids [B, q] continue this batch, and CacheFull unless they fit: in every layer, so
        that none has changed when one of them is full."""
        batch = self.last_logits.shape[0]
        if ids.shape[0] != batch:
            raise UserError(f"ids has {ids.shape[0]} rows and the cache {batch}; give one row for each prompt")
        for layer in self.attention_layers:
            layer.check_room(ids.shape[1])

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that the cache holds."""
        for layer in self.layers:
            yield from layer.buffers()

    # What transformers' caches can do beside: what was evicted does not come back, and slots know one prompt.

    def reset(self) -> None:
        """Refused with a UserError, as the rest below: another cache of the record is as good as new."""
        self._refuse("emptied")

    def crop(self, max_length: int) -> None:
        self._refuse("cut back")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._refuse("reordered")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("repeated")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse("taken apart")

    def _refuse(self, what: str) -> None:
        raise UserError(f"a compressed cache cannot be {what}; build another: build_cache(model, method, record)")


class PrefixCache:
    """What `recompute` carries instead of keys and values: the ids so far, [B, T]."""

    has_compressed = False
    compress_ms = 0.0
    kernel_name = "sdpa"

    def __init__(self, ids: Tensor, last_logits: Tensor) -> None:
        self.ids = ids
        self.last_logits = last_logits
        self.prompt_tokens = self.positions_processed = ids.shape[1]

    @property
    def seen(self) -> int:
        return self.ids.shape[1]

    @property
    def kept_tokens(self) -> float:
        return 0.0

    def buffers(self) -> Iterator[Buffer]:
        """The ids are not a cache: nothing is held."""
        return iter(())


AnyCache = KVCache | PrefixCache | StockCache
