"""No cache: every step runs the whole prefix."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.cache.rule import KeepRule


@dataclass(frozen=True)
class Recompute(KeepRule):
    """Keeps nothing and runs the whole prefix through the model every step.

    A prompt of 4 tokens and two steps process 4, 5 and 6 positions; with a cache 4, 1 and 1.
    """

    needs_budget: ClassVar[bool] = False
    needs_ids: ClassVar[bool] = True
