"""Layers that keep a state of fixed size instead of keys and values: linear attention and short convolutions.

Methods leave them alone. The model updates the state itself, through transformers' own cache layer; what is ours is
that a record keeps the state after its prompt, and that every cache built from the record has a copy of its own.
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
    """One layer's state: the last inputs of its convolution, [B, channels, kernel], and what linear attention sums up,
    [B, heads, key_dim, value_dim], where the layer has one.

    index: the layer. The state's dtype is the model's choice: linear attention often sums in float32.
    """

    def __init__(self, index: int, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.index = index

    def copy(self) -> "StateLayer":
        """The same state in memory of its own."""
        return deepcopy(self)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state."""
        for states in (self.conv_states, self.recurrent_states):
            yield from (state for state in states.values() if state is not None)

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that this layer holds; no token has a slot of its own in it."""
        return (Buffer("state", state, 1.0) for state in self.tensors())


def empty_states(config: PretrainedConfig) -> list[StateLayer]:
    """The layers of the model that keep a state, nothing in them yet, in the model's order."""
    text = config.get_text_config()
    number = getattr(text, "number_of_conv_states", 1)
    return [StateLayer(index, number) for index, kind in enumerate(layer_kinds(text)) if kind in STATES]


def in_model_order(layers: Iterable[Any], states: Sequence[StateLayer]) -> list[Any]:
    """Cache layers as the model counts them: each state at its own index, `layers` (of keys and values) between."""
    merged = list(layers)
    for state in states:  # ascending, so that what is before its index is complete
        merged.insert(state.index, state)
    return merged
