"""Which earlier tokens a layer's queries see, as the model's own mask functions say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reach:
    """A bounded layer: a query at position p sees p itself and a limited number of tokens before it.

    window: the limit, in tokens. chunked: positions are cut into chunks of `window` tokens and a query sees the tokens
    of its own chunk only (Llama 4); otherwise it sees the last `window` tokens (sliding window).
    """

    window: int
    chunked: bool = False

    def first_seen(self, position: Any) -> Any:
        """The first position that a query at `position` (a number or a tensor) sees; it may be negative."""
        return position // self.window * self.window if self.chunked else position - self.window + 1


def reach_of(size: int | None, config: Any, chunked: bool | None = None) -> Reach | None:
    """The reach of a layer whose mask function was given `size`; None where the layer sees every token.

    A size that no position of the model exceeds bounds nothing (Phi 3.5: 262,144 of 131,072 positions).
    chunked: None where the config has to tell a chunk from a sliding window by its size.
    """
    if size is None or size >= (getattr(config, "max_position_embeddings", None) or size + 1):
        return None
    if chunked is None:
        chunk, window = (getattr(config, key, None) for key in ("attention_chunk_size", "sliding_window"))
        chunked = size == chunk and size != window
    return Reach(size, chunked)
