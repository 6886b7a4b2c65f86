"""Rotary frequencies that change with the length of the text, where keys already cached no longer fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError

CHANGING = ("dynamic", "longrope")
"""Kinds of rotary scaling whose frequencies depend on the length of the text."""


@dataclass(frozen=True)
class FrequencyChange:
    """The length beyond which a model uses other rotary frequencies.

    kind: "longrope" switches once, from its short to its long factors. "dynamic" changes with every further token.
    tokens: the longest text of the first frequencies.
    """

    kind: str
    tokens: int

    def lies_between(self, seen: int, fed: int) -> bool:
        """Whether feeding `fed` tokens after `seen` cached ones needs other frequencies than the cached keys have."""
        if seen == 0 or seen + fed <= self.tokens:
            return False
        return self.kind == "dynamic" or seen <= self.tokens


def frequency_change(config: Any) -> FrequencyChange | None:
    """Where the frequencies of a model with this config change; None where they never do."""
    found = []
    for rope in rope_parameters(config):
        kind = rope.get("rope_type")
        named = rope if kind == "longrope" else {}
        tokens = named.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if kind in CHANGING and tokens is not None:
            found.append(FrequencyChange(kind, int(tokens)))
    return min(found, key=lambda change: change.tokens, default=None)


def rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary settings of a config: one mapping, or one for each kind of layer (Gemma 3)."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    yield from nested or [settings]


def refuse_crossing(change: FrequencyChange | None, name: str, seen: int, fed: int) -> None:
    """Raise UserError where `fed` tokens after `seen` cached ones cross the length at which frequencies change.

    The model's own forward would rotate the cached keys anew; a cache of rotated keys cannot.
    """
    if change is None or not change.lies_between(seen, fed):
        return
    alternative = "" if change.kind == "dynamic" else f", or give a prompt of more than {change.tokens} tokens"
    raise UserError(
        f"{name} has {change.kind} rotary frequencies, which change beyond {change.tokens} tokens, and "
        f"{seen} cached tokens are followed by {fed}: cached keys would keep the old frequencies; stay within "
        f"{change.tokens} tokens{alternative}"
    )
