"""Needle tables by task: both times of the question in one line, hits beyond the recent window beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.report.tables.measure_tables import build_tables
from kvbench.results.row import Row
from tests.report.synthetic import column, keys, table
from tests.shared.rows import BASE, rows


def made(task: str, question: str, hits: dict[str, tuple[int, int]], context: int = 1024) -> list[Row]:
    """Rows of 10 needles a method; of each method: hits, and hits among the four that lie beyond the window."""
    found = []
    for method, (of_all, beyond) in hits.items():
        budget = None if method == "full" else 256.0
        here = replace(BASE, method=method, store="dense", budget=budget, measure="needle", question=question)
        here = replace(here, protocol=task, context=context, n=10, unit="share")
        found.append(replace(here, metric="hit_rate", value=of_all / 10, low=0.1, high=0.9))
        found.append(replace(here, metric="hits", value=float(of_all), unit="hits"))
        found.append(replace(here, metric="hit_rate_beyond_recent", value=beyond / 4, n=4))
        if method != "full":
            less = (beyond - hits["full"][1]) / 4
            metric = "hit_rate_beyond_recent_minus_full"
            found.append(replace(here, metric=metric, value=less, n=4, low=less - 0.1, high=less + 0.1))
    return found


AFTER = {"full": (9, 4), "h2o": (6, 0), "streaming_llm": (5, 1)}
BEFORE = {"full": (10, 4), "h2o": (8, 3)}


def test_both_times_of_the_question_stand_in_one_line() -> None:
    found = table([*made("vt", "after", AFTER), *made("vt", "before", BEFORE)], "needle_vt")
    assert column(found, "method") == ["full", "h2o", "streaming_llm"]
    assert column(found, "after_hits") == ["9/10", "6/10", "5/10"]
    assert column(found, "before_hits") == ["10/10", "8/10", "–"]
    assert column(found, "after_rate")[1] == "60.0% [10%, 90%]"
    assert column(found, "after_recent") == ["4/4", "0/4", "1/4"]
    assert column(found, "before_recent") == ["4/4", "3/4", "–"]
    assert column(found, "after_recent_above") == ["–", "-100 points [-110, -90]", "-75 points [-85, -65]"]
    assert column(found, "before_recent_above")[1] == "-25 points [-35, -15]"
    assert any(part.startswith("beyond recent: ") for part in found.caption)
    assert "length 1,024" in found.caption
    record = found.records[1]
    assert (record["method"], record["context"]) == ("h2o", 1024)
    assert (record["after_hit_rate_beyond_recent"], record["after_hit_rate_beyond_recent_n"]) == (0.0, 4)
    assert (record["before_hit_rate"], record["before_hit_rate_low"]) == (0.8, 0.1)


def test_each_task_and_length_has_its_own_numbers() -> None:
    tasks = [*made("vt", "after", AFTER), *made("cwe", "after", BEFORE), *made("cwe", "after", AFTER, context=2048)]
    names = [found.name for found in build_tables(tasks)]
    assert names[-2:] == ["needle_vt", "needle_cwe"]
    found = table(tasks, "needle_cwe")
    assert column(found, "context") == ["1,024", "1,024", "1,024", "2,048", "2,048", "2,048"]
    assert column(found, "after_hits") == ["10/10", "8/10", "–", "9/10", "6/10", "5/10"]
    assert not any(key.startswith("before") for key in keys(found))


def test_hits_are_marked_where_the_full_cache_finds_fewer_than_half() -> None:
    rows_ = [*made("vt", "after", {"full": (4, 4), "h2o": (6, 0)}), *made("vt", "before", BEFORE)]
    found = table(rows_, "needle_vt")
    assert column(found, "after_hits") == ["4/10†", "6/10†"]
    assert column(found, "before_hits") == ["10/10", "8/10"]


def test_no_difference_has_no_sign() -> None:
    same = {"full": (9, 4), "h2o": (9, 4)}
    found = table([*made("vt", "after", same), *made("vt", "before", same)], "needle_vt")
    assert column(found, "after_recent_above")[1] == "0 points [-10, +10]"


@pytest.mark.parametrize("question", ["after", "before"])
def test_one_task_and_one_time_of_the_question_need_no_table_of_their_own(question: str) -> None:
    found = build_tables(made("vt", question, AFTER))
    assert [one.name for one in found] == ["needle"]
    assert column(found[0], "recent") == ["4/4", "0/4", "1/4"]
    assert "recent" not in keys(table(rows(), "needle_grid"))  # rows of earlier runs are not split
