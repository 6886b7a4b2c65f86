"""What is known of a run before weights are loaded: the model's shape, the text and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.models.checkpoint import ModelSpec
from kvbench.models.shape import ModelShape
from kvbench.texts.load import Text
from kvbench.texts.tokens import Stretch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Target:
    """Model and text of a run.

    tokens: the text, int64 [N], without special tokens; several texts one behind the other. stretches: where each text
    lies among them. bos: the tokens that windows and prompts begin with.
    tokenizer: None for random weights.
    """

    spec: ModelSpec
    shape: ModelShape
    text: Text
    tokens: Tensor
    stretches: tuple[Stretch, ...]
    tokenizer: Any
    bos: tuple[int, ...]
    seed: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [stretch.length for stretch in self.stretches]

    @property
    def haystack(self) -> Tensor:
        """The tokens of the first text: what retrieval prompts hide their needles in."""
        return self.tokens[: self.stretches[0].stop]
