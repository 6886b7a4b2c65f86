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
FOLDERS = [REFERENCE / name for name in ("methods", "budgets", "architecture", "first_light")]


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


def test_x_smaller_follows_from_the_tokens_that_were_kept_while_scored() -> None:
    """Of caches that hold kept tokens as the model made them: the recorded ratio, from the kept tokens alone.

    SmolLM2-135M holds 30 layers x 3 heads x 64 channels of keys and of values. The mean over the scored tokens of what
    a full cache has seen is its own kept tokens. Slots that wait for tokens make a cache larger than what it keeps.
    """
    rows = rows_of(load(REFERENCE / "methods"))
    (full,) = {number(row) for row in rows if _is_scored_kept(row) and (row.method, row.store) == ("full", "dense")}
    held = {(row.run, config_of(row), row.dataset): number(row) for row in rows if row.metric == "scored_bytes"}
    kept = {(row.run, config_of(row), row.dataset): number(row) for row in rows if _is_scored_kept(row)}
    checked = 0
    for row in rows:
        if (row.measure, row.metric) != ("perplexity", "x_smaller"):
            continue
        place = row.run, config_of(row), row.dataset
        token = 30 * 3 * 64 * 2 * (row.batch or 1)
        # Heads of adakv and kvzip hold whole blocks, as many as a batch needs.
        assert number(row) == pytest.approx(full * token * 2 / held[place], rel=2e-3)
        if row.store in ("dense", "bf16"):
            each = token * (4 if row.store == "dense" else 2)
            # At most 80 slots wait, half of the 128 scored tokens and a block; positions and scores take 3%.
            assert kept[place] * each <= held[place] < 1.03 * (kept[place] + 80) * each
            checked += 1
    assert checked > 40


def number(row: Row) -> float:
    assert row.value is not None
    return row.value


def _is_scored_kept(row: Row) -> bool:
    return row.measure == "perplexity" and row.metric == "scored_kept_tokens"
