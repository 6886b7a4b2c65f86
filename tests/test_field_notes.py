"""Faults that others shipped, where no other test stands for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from kvbench.cache.build import Method
from kvbench.errors import UserError
from kvbench.measures.memory import Memory
from kvbench.measures.memory.cache_bytes import measure_bytes
from kvbench.measures.needle import Needle
from kvbench.measures.needle.answers import ask_needles
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.perplexity.windows import score_windows
from kvbench.methods.full import Full
from kvbench.methods.kivi import Kivi
from kvbench.results.row import Row
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, light, methods, prose, rows_of, run_context_of, value

TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(3_000))["input_ids"])
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with light():
        yield


@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_group_of_one_token_is_not_billed_as_two_bits(group: int) -> None:
    """Minimum and maximum of one token are the token: exact keys, at a price of 34 bits. Such groups are refused."""
    with pytest.raises(UserError, match=f"group={group} for KIVI; type a multiple of 8"):
        Kivi(2, 2, group, 16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_are_on_the_bill(bits: int) -> None:
    method = Method("kivi", Full(), Kivi(bits, bits, 8, 16))
    found = rows_of(measure_bytes(run_context_of(MODEL, methods("full") | {"kivi": method}, TEXT), Memory([400], 4)))
    # 8 values share 32 bits of scale and minimum; the residual and the positions come on top.
    assert value(found, "kivi", "bits_per_value") > bits + 32 / 8
    codes, scales = (value(found, "kivi", f"held_bytes.{part}") for part in ("codes", "scales"))
    assert scales / codes == pytest.approx(32 / 8 / bits)


def test_peaks_stand_beside_what_is_held() -> None:
    """Both peaks stand in rows of their own beside what is held, none of them derived from another."""
    found = rows_of(measure_bytes(run_context_of(MODEL, methods("full", "kivi"), TEXT), Memory([400], 4)))
    metrics = {row.metric for row in found if row.method == "kivi"}
    assert {"peak_prefill_bytes", "peak_decode_bytes", "held_bytes", "allocator_bytes"} <= metrics
    notes = {row.note for row in found if row.metric in ("peak_prefill_bytes", "peak_decode_bytes")}
    assert all(note is not None and "above what was held before the phase" in note for note in notes)


def test_engaged_and_kept_stand_in_every_measure() -> None:
    """A prompt shorter than the budget: the rows say that nothing was compressed."""
    named = methods("full", "h2o", budget=200)
    bench = run_context_of(MODEL, named, TEXT, TOKENIZER)
    asked = Needle(lengths=[120], depths=[0.5], samples=2, question=["after"], batch=2)
    for rows in (
        rows_of(score_windows(bench, Perplexity(40, 10, 2, 2))),
        rows_of(ask_needles(bench, asked)),
        rows_of(measure_bytes(bench, Memory([40], 4))),
    ):
        engaged = [row.value for row in rows if row.method == "h2o" and row.metric == "engaged"]
        kept = [row.value for row in rows if row.method == "h2o" and row.metric == "kept_tokens"]
        assert engaged and set(engaged) == {0.0} and kept and None not in kept


def by_method(rows: list[Row]) -> dict[str | None, list[Row]]:
    return {method: [row for row in rows if row.method == method] for method in ("full", "h2o", "kivi", "random")}


@pytest.mark.parametrize("depths", [[0.0, 0.5, 1.0], [1.0, 0.0, 0.5]])
def test_the_order_of_methods_and_questions_changes_no_needle(depths: list[float]) -> None:
    asked = Needle(lengths=[120], depths=[0.0, 0.5, 1.0], samples=3, question=["after", "before"], batch=3)
    other = dataclasses.replace(asked, depths=depths, question=["before", "after"])
    one, two = methods("full", "h2o", "kivi", "random"), methods("full", "random", "kivi", "h2o")
    straight = rows_of(ask_needles(run_context_of(MODEL, one, TEXT, TOKENIZER), asked))
    turned = by_method(rows_of(ask_needles(run_context_of(MODEL, two, TEXT, TOKENIZER), other)))
    for method, rows in by_method(straight).items():
        assert sorted(map(str, rows)) == sorted(map(str, turned[method]))
