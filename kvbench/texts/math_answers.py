"""Scores of answers to mathematical problems, as MATH-500 and AIME publish them. No torch here."""

import re
from collections.abc import Sequence
from fractions import Fraction

TASKS = ("math_500", "aime_2024", "aime_2025")
"""Names of the files: columns `problem` and `answer`."""
ANSWER_TOKENS = 2048
"""Tokens of an answer at most, unless tasks.answer_tokens says otherwise."""
INSTRUCTION = "\n\nReason step by step, and put the final answer into \\boxed{}.\n"


def math(task: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 where the answer's last \\boxed{...}, or its last number if nothing is boxed, is one of the references.

    Equal are answers that `plain` writes alike, and equal numbers. Other forms of one value (2x + 2 and 2(x + 1))
    count as wrong, so scores lie a little below those of a computer algebra system.
    """
    said = final_answer(answer)
    return float(said is not None and any(_is_equal(said, reference) for reference in references))


def final_answer(answer: str) -> str | None:
    """What the last complete \\boxed{...} holds, else the last number; None where there is neither."""
    for found in reversed(list(re.finditer(r"\\boxed\s*\{", answer))):
        depth = 1
        for i in range(found.end(), len(answer)):
            depth += (answer[i] == "{") - (answer[i] == "}")
            if depth == 0:
                return answer[found.end() : i]
    numbers: list[str] = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", answer)
    return numbers[-1] if numbers else None


def plain(answer: str) -> str:
    """An answer without spaces, dollar signs, \\left, \\right, units in \\text, and the dot at its end."""
    text = re.sub(r"\\(?:left|right|!|,|;|displaystyle)|\$|\\%|%", "", answer)
    text = re.sub(r"\\(?:d|t)frac", r"\\frac", text)
    text = re.sub(r"\\text\{\s*([^}]*)\}", r"\1", text)
    return re.sub(r"\s+", "", text).rstrip(".")


def _is_equal(said: str, reference: str) -> bool:
    if plain(said) == plain(reference):
        return True
    ours, theirs = _number(said), _number(reference)
    return ours is not None and ours == theirs


def _number(answer: str) -> Fraction | None:
    """The number that an answer is: 0.5, 1/2, \\frac{1}{2} and 1,000; None for anything else."""
    text = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", plain(answer))
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
