"""What a retrieval task gives a prompt: the text in words, before it is cut to a length in tokens. No torch here."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "word", "uuid"]
Haystack = Literal["essay", "noise"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The repeated sentences of passkey retrieval (Mohtashami and Jaggi, 2023, arXiv:2305.16300)."""


@dataclass(frozen=True)
class Question:
    """A question about a text and its right answer.

    text, lead: what follows the context, the lead being the answer's beginning. references: what must come back.
    first_number: only the answer's first number counts. answer: the references as the answer writes them; None:
    separated by commas. space: whether a space stands between lead and answer.
    """

    text: str
    lead: str
    references: Sequence[str]
    first_number: bool = False
    answer: str | None = None
    space: bool = True

    @property
    def right_answer(self) -> str:
        """What a right answer says, as it follows the lead."""
        return " " * self.space + (self.answer or ", ".join(self.references))


@dataclass(frozen=True)
class Draft:
    """A prompt in words, before it is cut to a length in tokens.

    opening: what comes first. needles: sentences to hide. haystack: the text that they are hidden in, or a function
    that gives a text of n items with the needles among them. question, lead: what follows, the lead being the answer's
    beginning. references: what must come back. first_number: only the answer's first number counts. answer_needle: the
    hidden sentence that alone holds the answer; None where the answer takes several sentences, or a count. answer: the
    references as the answer writes them; None: separated by commas. further: more questions about the same text, which
    only the measure `turns` asks. space: as in `Question`. opening_share: largest share of the prompt's tokens that the
    opening may take; None: any.
    """

    opening: str
    needles: Sequence[str]
    haystack: Haystack | Callable[[int], str]
    question: str
    lead: str
    references: Sequence[str]
    first_number: bool = False
    answer_needle: str | None = None
    answer: str | None = None
    further: Sequence[Question] = ()
    space: bool = True
    opening_share: float | None = None

    @property
    def questions(self) -> tuple[Question, ...]:
        """All questions, the draft's own first."""
        own = Question(self.question, self.lead, self.references, self.first_number, self.answer, self.space)
        return (own, *self.further)


@dataclass(frozen=True)
class Task:
    """A retrieval task. draft: the prompt of a random state. grid: whether its needle goes to each asked-for depth.

    answer_tokens: what RULER lets a model say, 128 where it names nothing else. pool: whether it is made from
    words of the text.
    """

    name: str
    draft: Callable[[random.Random, "Words"], Draft]
    grid: bool = False
    answer_tokens: int = 128
    pool: bool = False


@dataclass(frozen=True)
class Words:
    """What a draft is made from: the words of the text, the length asked for, and the kind of value to hide (None:
    the task's own)."""

    pool: Sequence[str]
    length: int
    values: Kind | None = None
