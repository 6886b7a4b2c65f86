"""Methods with their numbers of all measures, grouped by model and device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.advice.answer_card import answer_card
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
    card = answer_card(groups)
    assert card is not None and {line.group.row.model for line in card.lines} == {"org/Toy-135M"}
    (told,) = [warning for warning in find_warnings(latents()) if warning.kind == "random weights"]
    assert told.text.startswith("org/Latent: ")
    assert not [warning for warning in find_warnings(latents()) if warning.kind == "missing"]


def test_retrieval_counts_the_tasks_that_the_full_cache_solves() -> None:
    def task(rows: list[Row], name: str, hits: float) -> list[Row]:
        """The needle rows once more, under another task and with `hits` in each depth."""
        found = [replace(row, protocol=name) for row in rows if row.measure == "needle"]
        return [replace(row, value=hits if row.metric == "hits" else hits / 4) for row in found]

    int4, int8 = cache("full", 10, 0.001, **OTHER), cache("full", 15, 0.001, **ONE)
    easy = FULL + int4 + int8
    hard = task(FULL, "hard", 1) + task(int4, "hard", 0) + task(int8, "hard", 0)
    (group,) = groups_of(easy + hard)
    assert [member.numbers["hit_rate"].n for member in group.members] == [12, 12]
    second = task(FULL, "second", 4) + task(int4, "second", 2) + task(int8, "second", 4)
    (group,) = groups_of(easy + hard + second)
    assert [member.numbers["hit_rate"].n for member in group.members] == [24, 24]
    assert [member.value("hit_rate") for member in group.members] == [0.75, 1]
    assert chosen(easy + second, "documents") == "full+int8"


def test_bytes_are_those_of_the_scored_cache_never_those_of_another_context() -> None:
    made = [*FULL, *cache("h2o", 4.0, 0.001, budget=100.0)]
    (group,) = groups_of(made)
    assert group.contexts["bytes"] == group.contexts["perplexity"] == 1024 and group.contexts["memory"] == 2048
    assert group.members[0].held == 4 * MIB and group.members[0].numbers["held_bytes"].value == 8 * MIB
    table = overview([group])
    assert table is not None and "bytes at 1,024 tokens" in table.caption
    assert next(one for one in table.columns if one.key == "held_bytes").full == ["40.0", "4.00"]

    (without,) = groups_of([row for row in made if row.metric != "scored_bytes"])
    assert without.members[0].held is None and "bytes" not in without.contexts
    older = [replace(row, metric="held_bytes") if row.metric == "scored_bytes" else row for row in made]
    (group,) = groups_of(older)
    assert group.members[0].held == 4 * MIB
    nearer = [replace(row, context=1024) if row.measure == "memory" else row for row in made]
    (group,) = groups_of([row for row in nearer if row.metric != "scored_bytes"])
    assert group.members[0].held == 8 * MIB  # of the memory measure, at the same context


def test_without_a_perplexity_bytes_are_those_of_the_memory_measure() -> None:
    (group,) = groups_of([row for row in [*FULL, *cache("h2o", 4.0, 0.001)] if row.measure == "memory"])
    assert group.contexts == {"bytes": 2048, "memory": 2048} and group.members[0].held == 8 * MIB


def test_means_and_last_values_of_bytes_are_not_mixed() -> None:
    mixed = [
        *(replace(row, metric="held_bytes") if row.metric == "scored_bytes" else row for row in FULL),
        *cache("h2o", 4.0, 0.001),
    ]
    both = [replace(row, metric="held_bytes", value=5 * MIB) for row in mixed if row.metric == "scored_bytes"]
    (group,) = groups_of([*mixed, *both])
    assert [one.scored.metric for one in group.everyone if one.scored] == ["held_bytes"] * 2
    assert group.members[0].held == 5 * MIB
