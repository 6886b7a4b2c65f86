"""Turn tables: the first question after and before compression in one line, a table for each task and mode."""

from __future__ import annotations

from dataclasses import replace

from kvbench.report.tables.measure_tables import build_tables
from kvbench.results.row import Row
from tests.report.synthetic import column, keys, table
from tests.shared.rows import BASE


def made(
    question: str, hits: dict[str, list[float]], protocol: str = "multi_needle/independent", context: int = 1024
) -> list[Row]:
    """Rows of 10 texts a method: of each method its hit rate at each turn."""
    found = []
    for method, by_turn in hits.items():
        budget = None if method == "full" else 256.0
        here = replace(BASE, method=method, store="dense", budget=budget, measure="turns", question=question)
        here = replace(here, protocol=protocol, context=context, unit="share", n=10)
        later = sum(by_turn[1:]) / len(by_turn[1:])
        rate = sum(by_turn) / len(by_turn)
        values = {"hit_rate": rate, "hit_rate_first": by_turn[0], "hit_rate_later": later}
        found += [replace(here, metric=name, value=value, low=0.0, high=1.0) for name, value in values.items()]
        found.append(replace(here, metric="later_minus_first", value=later - by_turn[0], low=-1.0, high=0.5))
        for turn, value in enumerate(by_turn, 1):
            found.append(replace(here, metric="hit_rate_at", position=turn, value=value))
        found.append(replace(here, metric="kept_tokens", value=budget or 1024.0, unit="tokens"))
        if method != "full":
            found.append(replace(here, metric="hit_rate_minus_full", value=rate - sum(hits["full"]) / len(by_turn)))
    return found


AFTER = {"full": [0.9, 0.8, 1.0], "snapkv": [0.2, 0.3, 0.1], "kvzip": [0.9, 0.8, 0.7]}
BEFORE = {"full": [0.9, 0.9, 0.9], "snapkv": [0.8, 0.1, 0.3]}


def test_both_times_of_the_first_question_stand_in_one_line() -> None:
    found = table([*made("after", AFTER), *made("before", BEFORE)], "turns_multi_needle_independent")
    assert found.title == "Turns: multi needle, independent" and found.terminal
    assert column(found, "method") == ["full", "snapkv", "kvzip"]
    assert column(found, "after_hit_rate_first") == ["90.0% [0%, 100%]", "20.0% [0%, 100%]", "90.0% [0%, 100%]"]
    assert column(found, "before_hit_rate_later") == ["90.0% [0%, 100%]", "20.0% [0%, 100%]", "–"]
    assert column(found, "before_later_minus_first")[1] == "-60 [-100, +50]"
    assert column(found, "after_hit_rate_minus_full") == ["–", "-70", "-10"]
    assert any(part.startswith("before: the first question") for part in found.caption)
    record = found.records[1]
    assert (record["method"], record["context"]) == ("snapkv", 1024)
    assert [record[f"before_hit_rate_at_{turn}"] for turn in (1, 2, 3)] == [0.8, 0.1, 0.3]
    assert (record["after_hit_rate_first"], record["after_hit_rate_first_n"]) == (0.2, 10)


def test_a_terminal_shows_the_number_without_its_interval() -> None:
    found = table(made("after", AFTER), "turns_multi_needle_independent")
    compact = {one.key: one.compact for one in found.columns}
    assert compact["after_hit_rate"][0] == "90.0%" and compact["after_later_minus_first"][1] == "0"
    assert not any(key.startswith("before") for key in keys(found))


def test_each_task_and_mode_has_a_table_and_each_length_a_line() -> None:
    several = [
        *made("after", AFTER),
        *made("after", AFTER, context=2048),
        *made("after", AFTER, "multi_needle/conversation"),
        *made("after", AFTER, "key_value/independent"),
    ]
    assert [one.name for one in build_tables(several)] == [
        "turns_multi_needle_independent",
        "turns_multi_needle_conversation",
        "turns_key_value_independent",
    ]
    found = table(several, "turns_multi_needle_independent")
    assert column(found, "context") == ["1,024", "1,024", "1,024", "2,048", "2,048", "2,048"]


def test_rates_are_marked_where_the_full_cache_answers_fewer_than_half() -> None:
    few = {"full": [0.3, 0.4, 0.5], "snapkv": [0.2, 0.2, 0.2]}
    found = table([*made("after", few), *made("before", BEFORE)], "turns_multi_needle_independent")
    assert all(text.endswith("†") for text in column(found, "after_hit_rate"))
    assert not any("†" in text for text in column(found, "before_hit_rate"))
    assert any(part.startswith("† the full cache answers") for part in found.caption)
    assert found.columns[1].compact[0].endswith("†")
