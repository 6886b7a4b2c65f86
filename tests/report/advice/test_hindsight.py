"""Hindsight beside the keep rules of its budget: KL, paired over windows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvbench.report.advice.hindsight import ceiling_pairs, hindsight_findings
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.compare.window_verdicts import evidence_of
from tests.report.synthetic import rival_samples


def samples_of(kl: dict[str, float], windows: int = 32, noise: float = 0.002) -> list[WindowSample]:
    """Windows of methods of one budget whose KL is a share of the window, the method's own mean and noise."""
    pick = random.Random(1)
    shared = {str(place): abs(pick.gauss(0, 0.05)) for place in range(windows)}
    made = rival_samples(windows, kl)
    return [
        replace(sample, scores={"kl": kl[str(sample.row.method)] + shared[sample.window] + pick.gauss(0, noise)})
        for sample in made
    ]


def test_a_rule_that_hindsight_does_not_beat_is_a_finding_about_attention_mass() -> None:
    evidence = evidence_of(samples_of({"hindsight": 0.1, "h2o": 0.08, "tova": 0.1001, "random": 0.5}))
    pairs = {pair.rule: pair for pair in ceiling_pairs(evidence)}
    assert {rule for rule, pair in pairs.items() if pair.told_apart} == {"h2o", "random"}
    assert pairs["h2o"].difference == pytest.approx(-0.02, abs=0.002)
    (sentence,) = hindsight_findings(evidence)
    assert sentence.startswith("hindsight (sees the future) does not beat every rule of its budget (paired over 32")
    assert "h2o by 0.0" in sentence and "tova cannot be told apart from it" in sentence and "random" not in sentence
    assert "attend to most are not the best tokens to keep" in sentence


def test_hindsight_that_beats_all_rules_or_has_too_few_windows_says_so() -> None:
    kl = {"hindsight": 0.05, "h2o": 0.08, "random": 0.5}
    (sentence,) = hindsight_findings(evidence_of(samples_of(kl)))
    assert sentence == (
        "hindsight (sees the future) has a lower KL than h2o, random (paired over 32 windows, corrected by Holm)."
    )
    (few,) = hindsight_findings(evidence_of(samples_of(kl, windows=9)))
    assert few.endswith("on 9 windows: fewer than 10 windows, no verdict.")
    assert hindsight_findings(evidence_of(samples_of({"h2o": 0.1, "random": 0.3}))) == []


def test_rules_of_another_budget_or_store_are_not_compared() -> None:
    samples = samples_of({"hindsight": 0.1, "h2o": 0.05})
    for other in ({"budget": 64.0}, {"store": "int4"}, {"knobs": '{"decode": "append"}'}):
        moved = [
            replace(sample, row=replace(sample.row, **other)) if sample.row.method == "h2o" else sample  # type: ignore[arg-type]
            for sample in samples
        ]
        assert ceiling_pairs(evidence_of(moved)) == []


def test_hindsight_is_never_among_the_best_methods() -> None:
    evidence = evidence_of(rival_samples(32, {"hindsight": 0.0, "h2o": 0.1, "tova": 0.1002, "random": 0.3}))
    (family,) = evidence.families
    assert family.labels[0] == "hindsight (sees the future)" and sorted(family.best) == [1, 2]
    assert [evidence.is_best(row) for row in family.rows] == [False, True, True, False]
    only = evidence_of(rival_samples(32, {"hindsight": 0.0, "h2o": 0.1}))
    assert not only.best  # of one real method there is no better one
