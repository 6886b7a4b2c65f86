"""In published reports bytes and quality of one plotted point come from one cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.report.compare.comparison import config_of
from kvbench.report.compare.methods import groups_of
from kvbench.report.figures.trade_off import DIFFERENCE, KL, TOP1, trade_offs
from kvbench.results.loading import load
from kvbench.results.row import Row, rows_of

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
FOLDERS = [REFERENCE / name for name in ("methods", "architecture", "first_light")]


def pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Quality and size of every point of the figures."""
    return [
        (one.quality, one.size)
        for group in groups_of(rows)
        for metric in (KL, DIFFERENCE, TOP1)
        for one in trade_offs(group, metric)
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_both_numbers_have_the_same_measure_context_run_and_kept_tokens(folder: Path) -> None:
    rows = rows_of(load(folder))
    kept = {(row.run, config_of(row), row.context, row.kv_heads): row.value for row in rows if _is_kept(row)}
    found = pairs(rows)
    assert len(found) > 20
    for quality, size in found:
        assert quality.measure == size.measure == "perplexity"
        assert (quality.run, quality.context, quality.model) == (size.run, size.context, size.model)
        assert (config_of(quality), quality.kv_heads, quality.batch) == (config_of(size), size.kv_heads, size.batch)
        places = [(one.run, config_of(one), one.context, one.kv_heads) for one in (quality, size)]
        assert kept[places[0]] == kept[places[1]]


def _is_kept(row: Row) -> bool:
    return row.measure == "perplexity" and row.metric == "kept_tokens"


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_bytes_in_sentences_and_overview_are_at_the_context_of_the_perplexity(folder: Path) -> None:
    for group in groups_of(rows_of(load(folder))):
        for member in group.everyone:
            if member.scored is not None and "ppl" in member.numbers:
                assert member.scored.context == member.numbers["ppl"].context == group.contexts["bytes"]
