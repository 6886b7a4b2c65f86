"""Advice on an architecture."""

from __future__ import annotations

from dataclasses import replace

from tests.report.synthetic import FULL, advice_on, cache


def test_architectures_need_two_and_a_quality_to_compare() -> None:
    assert advice_on(FULL, "architecture").too_little
    other = [replace(row, model="org/Other", arch="mla") for row in cache("full", 5, 0)]
    assert advice_on([*FULL, *other], "architecture").answer == "mla (Other)"
    worse = [replace(row, model="org/Other", arch="mla") for row in cache("full", 5, 1.0)]
    assert advice_on([*FULL, *worse], "architecture").answer == "gqa (Toy-135M)"
    pooled = [replace(row, converted=True) for row in other]
    advice = advice_on([*FULL, *pooled], "architecture")
    assert advice.too_little and any("converted" in limit for limit in advice.limits)
    foreign = [replace(row, tokenizer="other") for row in other]
    assert advice_on([*FULL, *foreign], "architecture").answer is None
