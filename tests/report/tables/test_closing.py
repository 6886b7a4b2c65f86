"""The sentences that close the output in a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.report.tables.closing import MOST_SENTENCES, closing_sentences
from kvbench.report.tables.measure_tables import TerminalTable
from kvbench.results.row import Row
from tests.report.synthetic import FULL, OTHER, cache, judged_groups, windows_of
from tests.shared.rows import METHODS, rows


def sixteen(made: list[Row]) -> list[Row]:
    """The rows, and x_smaller made from the bytes of a float32 run whose full cache holds 40 MiB."""
    held = [row for row in made if row.metric == "scored_bytes"]
    return [*made, *(replace(row, metric="x_smaller", value=20 * 2**20 / (row.value or 1), unit="x") for row in held)]


def closing(made: list[Row], windows: int) -> list[str]:
    return closing_sentences(judged_groups(sixteen(made), windows))


def test_size_against_16_bits_loss_and_windows_in_one_sentence() -> None:
    h2o, tova = cache("h2o", 5, 0.05, budget=256.0), cache("tova", 10, 0.001, reach=0.002, budget=256.0)
    (text,) = closing([*FULL, *h2o], 8)
    assert text == (
        "256 kept tokens: h2o is 4.0x smaller than a 16-bit full cache at +0.050 nats a token; 8 windows, fewer than "
        "10: no verdict."
    )
    (text,) = closing([*FULL, *h2o, *tova], 16)
    assert text == (
        "256 kept tokens: h2o is 4.0x smaller than a 16-bit full cache at +0.050 nats a token (worse), tova 2.0x "
        "smaller at +0.0010 nats (within margin); 16 windows."
    )


def test_a_cache_that_is_larger_than_in_16_bits_is_called_that() -> None:
    (text,) = closing([*FULL, *cache("full", 30, 0.001, **OTHER)], 16)
    assert text.startswith("All tokens kept: full+int4 is 1.5x larger than a 16-bit full cache at +0.0010 nats a token")
    (text,) = closing([*FULL, *cache("full", 20.2, 0.001, **OTHER)], 16)
    assert "full+int4 is as large as a 16-bit full cache at" in text


def test_budgets_have_a_sentence_each_and_many_methods_one_name() -> None:
    made = [*FULL]
    for name, loss in (("h2o", 0.3), ("tova", 0.2), ("knorm", 0.4), ("snapkv", 0.5), ("lagkv", 0.6)):
        made += cache(name, 5, loss, budget=64.0)
    made += cache("h2o", 10, 0.1, budget=0.25)
    small, share = closing(made, 16)
    assert small.startswith(
        "64 kept tokens: the lowest loss of 5 methods: tova is 4.0x smaller than a 16-bit full cache"
    )
    assert "h2o" not in small and share.startswith("25% of the tokens kept: h2o is 2.0x smaller")
    many = [row for budget in range(20) for row in cache("h2o", 5, 0.1, budget=32.0 + budget)]
    assert len(found := closing([*FULL, *many], 16)) == MOST_SENTENCES + 1
    assert found[-1] == "... and 14 more budgets in the report."


def test_nothing_is_said_without_bytes() -> None:
    assert closing_sentences(groups_of(rows(METHODS, ["latency"]))) == []
    assert closing_sentences(groups_of([])) == []


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_terminal_shows_names_whole_the_windows_and_the_closing_sentence(width: int) -> None:
    made = rows(METHODS, ["perplexity", "memory"], contexts=[512])
    made += [replace(row, metric="windows", value=32.0, unit="windows") for row in made if row.metric == "ppl"]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(TerminalTable(made, None, evidence_of(windows_of(made, 32))))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for name in ("streaming_llm", "h2o+int4", "kivi8"):
        assert sum(line.startswith(f"{name} ") for line in lines) >= 2, name
    text = " ".join(" ".join(lines).split())
    assert "windows 32" in text
    assert "256 kept tokens: h2o is 2.0x smaller than a 16-bit full cache at +0.048 nats a token (worse)" in text
