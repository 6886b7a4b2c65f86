"""Methods compared with each other on the same windows: every pair within one budget and one decode mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.report.compare.comparison import comparison_key, config_of, decode_of, sees_future
from kvbench.report.compare.names import labels
from kvbench.report.compare.window_samples import MethodWindows, WindowKey
from kvbench.results.method_pairs import MethodPairs, best_set, holm_matrix
from kvbench.results.paired import FEWEST_UNITS, LEVEL
from kvbench.results.row import Row

LARGEST = 100
"""Methods of a family. In a larger one the pairs are too many for any to survive the correction."""


@dataclass(frozen=True)
class MethodFamily:
    """Methods of one model, device, context, protocol, budget and decode mode, on the same windows.

    rows: the methods, in the order of `matrix`. labels: their names. best: places of the method with the lowest ΔNLL
    and of those that cannot be told apart from it, methods that see the future left out.
    """

    rows: tuple[Row, ...]
    labels: tuple[str, ...]
    matrix: MethodPairs
    best: tuple[int, ...]

    @property
    def marks_best(self) -> bool:
        """At least one method is shown to be worse than the best one."""
        return len(self.best) < sum(not sees_future(row) for row in self.rows)

    def differ(self, one: int, other: int) -> bool:
        """These two methods can be told apart at 5%, corrected for all pairs of the family."""
        return bool(self.matrix.p[one, other] < 1 - LEVEL)


def families_of(windows: Mapping[WindowKey, MethodWindows]) -> list[MethodFamily]:
    """All families of two methods or more on 10 windows or more, in the order of their first method."""
    names = labels([method.row for method in windows.values()])
    members: dict[tuple[Any, ...], list[MethodWindows]] = {}
    for method in windows.values():
        row = method.row
        members.setdefault((*family_key(row), frozenset(method.differences)), []).append(method)
    found = (list(own) for own in members.values() if 2 <= len(own) <= LARGEST)
    return [_family(own, [names[config_of(one.row)] for one in own]) for own in found if _enough(own)]


def family_key(row: Row) -> tuple[Any, ...]:
    """Equal for methods of one model, device, text, context, protocol, budget and decode mode."""
    setting = (row.dataset, row.context, row.protocol, row.budget, decode_of(row))
    return (*comparison_key(row, across_measures=True), *setting)


def _enough(methods: Iterable[MethodWindows]) -> bool:
    return all(len(method.differences) >= FEWEST_UNITS for method in methods)


def _family(methods: list[MethodWindows], names: list[str]) -> MethodFamily:
    order = sorted(methods[0].differences)
    units = {str(place): [method.differences[name] for name in order] for place, method in enumerate(methods)}
    matrix = holm_matrix(units)
    futures = [sees_future(method.row) for method in methods]
    means = {place: math.nan if futures[int(place)] else sum(values) / len(values) for place, values in units.items()}
    best = tuple(int(place) for place in best_set(matrix, means))
    return MethodFamily(tuple(method.row for method in methods), tuple(names), matrix, best)
