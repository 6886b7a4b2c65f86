"""The full cache: every token, in the model's dtype. The baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.cache.rule import KeepRule


@dataclass(frozen=True)
class Full(KeepRule):
    """Keeps every token: 2 * layers * batch * tokens * KV heads * head size * bytes a number."""

    needs_budget: ClassVar[bool] = False
