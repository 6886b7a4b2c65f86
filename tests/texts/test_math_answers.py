"""Answers to mathematical problems: which ones count as the reference."""

from __future__ import annotations

import pytest

from kvbench.texts.math_answers import final_answer, math


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        (r"so \boxed{42}.", "42", 1),
        (r"first \boxed{41}, no: \boxed{42}", "42", 1),
        (r"first \boxed{42}, no: \boxed{41}", "42", 0),
        (r"\boxed{\frac{1}{2}}", r"\dfrac{1}{2}", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{-\frac{3}{4}}", "-3/4", 1),
        (r"\boxed{1,234}", "1234", 1),
        (r"\boxed{1,2}", "12", 0),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left(3,\frac{\pi}{2}\right)", 1),
        (r"\boxed{x^{2} + 1}", "x^{2}+1", 1),
        (r"\boxed{12\text{ cm}}", "12cm", 1),
        ("the answer is 204.", "204", 1),
        ("it is 204, and 3 remain", "204", 0),
        (r"\boxed{204", "204", 1),  # never closed: the last number counts
        (r"\boxed{007}", "7", 1),
        (r"\boxed{1/0}", "1", 0),
        ("nothing", "0", 0),
        ("", "0", 0),
    ],
)
def test_the_last_box_or_number_counts(answer: str, reference: str, score: int) -> None:
    assert math("math_500", answer, [reference]) == score


def test_braces_inside_a_box_are_part_of_it() -> None:
    assert final_answer(r"\boxed{\sqrt{2} + {1}} and then") == r"\sqrt{2} + {1}"
    assert final_answer("no number") is None
