"""Paging's rows against counts by hand: bytes of a rectangle, of blocks, and of blocks that requests share."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import pytest
import torch

from kvbench.cache.build import Method
from kvbench.cache.paged import PagedStore
from kvbench.errors import UserError
from kvbench.measures.paging import Paging
from kvbench.measures.paging.shared_prefixes import NOTE, measure_pages
from kvbench.methods.full import Full
from kvbench.methods.per_token import PerToken
from kvbench.results.row import Row
from tests.shared.models import random_llama
from tests.shared.text import light, methods, rows_of, run_context_of, value

LAYERS, KV_HEADS, HEAD = 2, 2, 16
MODEL = random_llama(4, KV_HEADS, HEAD, layers=LAYERS, dtype=torch.float32)
PREFIX, OWN, TOKENS = 40, [3, 25, 60], 6
LENGTHS = [PREFIX + own + TOKENS for own in OWN]
A_TOKEN = 2 * LAYERS * KV_HEADS * HEAD * 4


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """A text whose first tokens and the three behind the prefix are all different: nothing matches by chance."""
    text = torch.cat([torch.arange(90), torch.randint(97, (400,), generator=torch.Generator().manual_seed(1))])
    named = methods("full")
    named |= {
        "paged": Method("full", Full(), PagedStore()),
        "paged8": Method("full", Full(), PagedStore(PerToken(8, 8, 8))),
    }
    with light():
        yield rows_of(measure_pages(run_context_of(MODEL, named, text), Paging(PREFIX, OWN, TOKENS)))


def test_a_rectangle_for_all(rows: list[Row]) -> None:
    for name in ("full", "paged"):
        assert value(rows, name, "contiguous_bytes") == len(OWN) * max(LENGTHS) * A_TOKEN
        waste = (len(OWN) * max(LENGTHS) - sum(LENGTHS)) * A_TOKEN
        assert value(rows, name, "contiguous_waste_bytes") == pytest.approx(waste)
    assert value(rows, "paged8", "contiguous_bytes") == len(OWN) * max(LENGTHS) * 2 * LAYERS * KV_HEADS * (16 + 2 * 4)


def test_blocks_and_what_is_shared_of_them(rows: list[Row]) -> None:
    """The first prompt has 2 full blocks, so the second shares 32 tokens; its third block then serves the last one."""
    blocks = [ceil(n / 16) for n in LENGTHS]
    tables = 4 * LAYERS * sum(blocks)
    assert value(rows, "paged", "paged_bytes") == sum(blocks) * 16 * A_TOKEN + tables
    assert value(rows, "paged", "paged_waste_bytes") == pytest.approx((16 * sum(blocks) - sum(LENGTHS)) * A_TOKEN)
    assert value(rows, "paged", "shared_bytes") == (sum(blocks) - 4) * 16 * A_TOKEN + tables
    assert value(rows, "paged", "saved_bytes") == 4 * 16 * A_TOKEN
    assert value(rows, "paged", "positions_saved") == 32 + 40
    assert value(rows, "paged", "positions_processed") == sum(LENGTHS) - 72
    difference = value(rows, "paged", "logit_difference")
    assert difference is not None and 0 < difference < 1e-3


def test_every_row_says_what_paging_is(rows: list[Row]) -> None:
    measured = [row for row in rows if row.metric]
    assert {row.note for row in measured} == {NOTE} and "not compression" in NOTE
    assert {(row.context, row.batch, row.protocol) for row in measured} == {(100, 3, "40 tokens in common")}


def test_a_rule_that_evicts_is_refused() -> None:
    for name in ("h2o", "recompute"):
        with pytest.raises(UserError, match="type method=full store=paged"):
            Paging().refuse(methods(name)[name])
    for method in (methods("full")["full"], Method("full", Full(), PagedStore())):
        Paging().refuse(method)
