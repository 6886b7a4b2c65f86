"""Layers that keep a state of fixed size instead of keys and values: linear attention and short convolutions.

No method compresses a state. The model updates it through transformers' own cache layer. A record keeps the state after
its prompt, and every cache built from the record has a copy of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from kvbench.cache.slots import Buffer
from kvbench.models.shape import STATES, layer_kinds


class StateLayer(LinearAttentionLayer):
    """One layer's state: the last inputs of its convolution, [B, channels, kernel], and the sums of linear attention,
    [B, heads, key_dim, value_dim], where the layer has them.

    index: the layer. The state's dtype is the model's choice: linear attention often sums in float32.
    """

    def __init__(self, index: int, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.index = index

    def copy(self) -> "StateLayer":
        """An equal state in memory of its own."""
        return deepcopy(self)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state."""
        for states in (self.conv_states, self.recurrent_states):
            yield from (state for state in states.values() if state is not None)

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that this layer holds; all of it is in use."""
        return (Buffer("state", state, 1.0) for state in self.tensors())


def empty_states(config: PretrainedConfig) -> list[StateLayer]:
    """The model's layers that keep a state, still empty, in the model's order."""
    text = config.get_text_config()
    number = getattr(text, "number_of_conv_states", 1)
    return [StateLayer(index, number) for index, kind in enumerate(layer_kinds(text)) if kind in STATES]


def in_model_order(layers: Iterable[Any], states: Sequence[StateLayer]) -> list[Any]:
    """All cache layers in the model's order: each state at its own index, `layers` (of keys and values) between."""
    merged = list(layers)
    for state in states:  # ascending, so that all layers before its index are there
        merged.insert(state.index, state)
    return merged
