"""No cache at all: the reason the cache exists."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.cache.rule import KeepRule


@dataclass(frozen=True)
class Recompute(KeepRule):
    """Keeps nothing and runs the whole prefix through the model every step.

    A prompt of 4 and two more tokens process 4, 5 and 6 positions, against 4, 1 and 1 with a cache.
    """

    needs_budget: ClassVar[bool] = False
    needs_ids: ClassVar[bool] = True
