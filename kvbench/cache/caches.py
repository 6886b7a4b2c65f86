"""A compressed cache, and the kinds of caches that there are."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.forward import forward
from kvbench.cache.layer import SlotLayer
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.recompute import RecomputeCache
from kvbench.cache.rule import SlidingWindow
from kvbench.cache.slots import Buffer
from kvbench.cache.state import StateLayer, in_model_order
from kvbench.cache.stock import StockCache

Layer = SlotLayer | RaggedLayer
"""A layer's cache: all heads keep equally many tokens, or each head a number of its own."""


class KVCache(DecodeCache, Cache):
    """A compressed cache, ready to decode after its prompt.

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
        self.prompt_tokens = self.positions_processed = prompt_tokens

    @property
    def kernel_name(self) -> str:
        return self.attention_layers[0].kernel.name

    @property
    def seen(self) -> int:
        return self.attention_layers[0].seen

    @property
    def has_compressed(self) -> bool:
        return any(layer.has_compressed for layer in self.compressible)

    @property
    def compressible(self) -> list[Layer]:
        """The layers that the method applies to; those with a sliding window or a state are bounded already."""
        return [layer for layer in self.attention_layers if not isinstance(layer.rule, SlidingWindow)]

    @property
    def kept_tokens(self) -> float:
        layers = self.compressible or self.attention_layers
        return sum(layer.kept for layer in layers) / len(layers)

    def kept_positions(self) -> dict[int, Tensor]:
        return {layer.index: layer.kept_positions() for layer in self.compressible}

    def check_room(self, ids: Tensor) -> None:
        """Raise UserError unless ids [B, q] continue this batch, and CacheFull unless they fit in every layer.

        All layers are asked before any of them changes.
        """
        super().check_room(ids)
        for layer in self.attention_layers:
            layer.check_room(ids.shape[1])

    def run(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int) -> Tensor:
        logits = forward(model, ids, self, logits_to_keep)
        self.positions_processed += ids.shape[1]
        return logits

    def buffers(self) -> Iterator[Buffer]:
        for layer in self.layers:
            yield from layer.buffers()


AnyCache = KVCache | RecomputeCache | StockCache
