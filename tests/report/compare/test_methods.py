"""Methods with their numbers of all measures, grouped by model and device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.advice.scenarios import advise
from kvbench.report.compare.methods import group_name, groups_of
from kvbench.report.compare.warnings import find_warnings
from kvbench.report.tables.method_tables import overview
from kvbench.results.row import Row
from tests.report.synthetic import FULL, MIB, ONE, OTHER, cache, chosen, latents


def test_layouts_are_compared_with_their_own_full_cache_and_random_weights_get_no_advice() -> None:
    groups = groups_of([*latents(), *FULL, *cache("full", 20, 0.001, **ONE)])
    assert [group.row.model for group in groups] == ["org/Toy-135M", "org/Latent", "org/Latent"]  # random weights last
    assert [group.times_smaller(group.members[0]) for group in groups[1:]] == [pytest.approx(5)] * 2
    assert [group_name(group, groups) for group in groups[1:]] == ["Latent, mla expand", "Latent, mla absorbed"]
    assert {one.group.row.model for one in advise(groups)} == {"org/Toy-135M"}
    (told,) = [warning for warning in find_warnings(latents()) if warning.kind == "random weights"]
    assert told.text.startswith("org/Latent: ")
    assert not [warning for warning in find_warnings(latents()) if warning.kind == "missing"]


def test_retrieval_counts_the_tasks_that_the_full_cache_solves() -> None:
    def task(rows: list[Row], name: str, hits: float) -> list[Row]:
        """The needle rows once more, under another task and with `hits` in each depth."""
        found = [replace(row, protocol=name) for row in rows if row.measure == "needle"]
        return [replace(row, value=hits if row.metric == "hits" else hits / 4) for row in found]

    int4, int8 = cache("full", 10, 0.001, **OTHER), cache("full", 20, 0.001, **ONE)
    easy = FULL + int4 + int8
    hard = task(FULL, "hard", 1) + task(int4, "hard", 0) + task(int8, "hard", 0)
    (group,) = groups_of(easy + hard)
    assert [member.numbers["hit_rate"].n for member in group.members] == [12, 12]
    second = task(FULL, "second", 4) + task(int4, "second", 2) + task(int8, "second", 4)
    (group,) = groups_of(easy + hard + second)
    assert [member.numbers["hit_rate"].n for member in group.members] == [24, 24]
    assert [member.value("hit_rate") for member in group.members] == [0.75, 1]
    assert chosen(easy + second, "retrieval") == "full+int8"


def test_bytes_come_from_the_measure_that_has_them_of_more_methods() -> None:
    members = [cache("h2o", held, 0.001, budget=budget) for held, budget in ((4.0, 100.0), (8.0, 200.0))]
    made = [*FULL, *members[0], *members[1]]
    at = [replace(row, metric="held_bytes", value=2.0**24, unit="bytes") for row in made if row.metric == "ppl"]
    (both,) = groups_of([*made, *at])
    assert both.contexts["memory"] == 2048 and [one.held for one in both.members] == [4 * MIB, 8 * MIB]
    fewer = [row for row in made if not (row.metric == "held_bytes" and row.budget == 200)]
    (group,) = groups_of([*fewer, *at])
    assert group.contexts["memory"] == 1024 and {one.held for one in group.members} == {2.0**24}
    assert "memory at 1,024 tokens" in overview([group]).caption  # type: ignore[union-attr]
