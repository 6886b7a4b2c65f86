"""The line for a new model: bytes a token, and quality on the windows that all models scored."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvbench.report.advice.answer_card import answer_card
from kvbench.report.advice.card import CardLine
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.window_samples import WindowSample
from kvbench.report.compare.window_verdicts import evidence_of
from kvbench.results.row import Row
from tests.report.synthetic import FULL, cache

OTHER_MODEL = [replace(row, model="org/Other", arch="mla") for row in cache("full", 5, 0)]


def line_of(rows: list[Row], worse_by: float = 0.0, windows: int = 16, apart: str = "") -> CardLine:
    """The line, from windows on which the other model's NLL is higher by `worse_by`; apart: windows of its own."""
    pick, samples = random.Random(0), []
    for row in (row for row in rows if row.metric == "ppl" and row.method == "full" and row.store == "dense"):
        other = row.model == "org/Other"
        for place in range(windows):
            nll = 3 + 0.1 * place + (worse_by + pick.gauss(0, 0.001) if other else 0.0)
            samples.append(WindowSample(row, f"{place}{apart if other else ''}", 0.0, None, {"nll": nll}))
    evidence = evidence_of(samples)
    card = answer_card(groups_of(rows, evidence), evidence)
    assert card is not None
    return next(line for line in card.lines if line.key == "architecture")


@pytest.mark.parametrize(
    ("worse_by", "answer"),
    [(0.0, "mla (Other)"), (0.005, "mla (Other)"), (0.05, "gqa (Toy-135M)"), (-0.5, "mla (Other)")],
)
def test_the_fewest_bytes_a_token_within_the_margin_of_the_best_are_taken(worse_by: float, answer: str) -> None:
    line = line_of([*FULL, *OTHER_MODEL], worse_by)
    assert (line.setting, line.mark) == (answer, "")
    if worse_by == 0.05:
        assert line.cost == "lowest NLL of them" and line.smaller == "1.00x (largest of these models)"
        assert any("mla (Other): NLL worse by 0.05 nats" in reason for reason in line.reasons)
    else:
        assert line.smaller == "8.00x (largest of these models)"


def test_intervals_of_rows_decide_nothing_and_few_or_other_windows_give_no_answer() -> None:
    rows = [*FULL, *OTHER_MODEL]
    for line, word in (
        (line_of(rows, windows=9), "9 windows of the same tokens were scored by all of them: 10 needed"),
        (line_of(rows, apart="b"), "0 windows of the same tokens were scored by all of them: 10 needed"),
        (line_of(rows, windows=0), "no two architectures have windows in samples.jsonl"),
        (line_of([*FULL, *(replace(row, tokenizer="other") for row in OTHER_MODEL)]), "10 needed, and one tokenizer"),
        (line_of(FULL), "architectures measured: gqa; needs two models trained with different attention"),
    ):
        assert (line.setting, line.mark) == ("–", "not enough data") and word in line.reasons[-1]
        assert line.command == "python -m kvbench.plan model=llama3.1-8b context=32768"


def test_converted_heads_and_random_weights_are_left_out() -> None:
    pooled = [replace(row, converted=True) for row in OTHER_MODEL]
    line = line_of([*FULL, *pooled])
    assert line.setting == "–" and any("1 model converted" in limit for limit in line.limits)
    assert line_of([*FULL, *(replace(row, weights="random") for row in OTHER_MODEL)]).setting == "–"
