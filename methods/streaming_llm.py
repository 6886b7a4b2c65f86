"""StreamingLLM: attention sinks plus a sliding window."""

from dataclasses import dataclass

from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import choice, whole


@dataclass(frozen=True)
class StreamingLLM(KeepRule):
    """Keeps the first `n_sink` tokens and the newest tokens (Xiao et al., 2024, arXiv:2309.17453).

    The window is budget - n_sink tokens. With variant "in_cache" positions are counted inside the cache: keys in the
    window keep their relative distances, so only the distance to the sinks changes, and for the sinks the query is
    rotated back by the number of evicted tokens. Variant "absolute" keeps original positions.
    """

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    variant: str = choice("in_cache", "absolute")

    @property
    def sinks_in_place(self) -> int:
        return self.first_tokens if self.variant == "in_cache" else 0
