"""Which samples are measured again: drawn by a hash, so that nobody chooses them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.results.verification import VerifyRecord

ALTERED = (1, 10, 100)
"""Numbers of altered samples whose chance to escape is printed."""


@dataclass(frozen=True)
class Unit:
    """What can be measured again by itself: one method on one sample of a cell. cell: its index among the cells.
    sample: number of the sample; 0 where a cell has none, as for memory."""

    cell: int
    sample: int
    label: str

    @property
    def name(self) -> str:
        return f"{self.cell}/{self.sample}/{self.label}"


def drawn(units: Sequence[Unit], count: int, *words: str) -> list[Unit]:
    """The `count` units whose names have the smallest sha256 together with the words; all where there are fewer.

    words: the hash of the folder's content, the hash of the source, a word of the verifier's.
    """
    salt = "\n".join(words)

    def key(unit: Unit) -> str:
        return hashlib.sha256(f"{salt}\n{unit.name}".encode()).hexdigest()

    return sorted(units, key=key)[:count]


def escape_chance(population: int, count: int, altered: int) -> float:
    """Probability that none of `altered` units is among `count` drawn without replacement from `population`."""
    if altered > population - count:
        return 0.0
    return math.comb(population - altered, count) / math.comb(population, count)


def fewest_caught(population: int, count: int, chance: float = 0.05) -> int:
    """The fewest altered units that escape with at most this probability."""
    return next(m for m in range(1, population + 1) if escape_chance(population, count, m) <= chance)


def escapes(record: VerifyRecord) -> str:
    """The chance that altered samples escape the draw, for some numbers of them."""
    population, count = record.population, record.drawn
    if not count:
        return "nothing could be drawn"
    told = [f"{m}: {escape_chance(population, count, m):.1%}" for m in ALTERED if m <= population - count]
    enough = f"{fewest_caught(population, count)} or more escape with at most 5%"
    return f"altered samples escape the draw with probability {', '.join([*told, enough])}"
