"""Tasks with several questions about one text, for the measure `turns`; `needle` asks the first question alone.

The kinds are those of SCBench (Li et al., 2024, arXiv:2412.10319), which asks several questions of one shared context:
key-value retrieval, several needles, variable tracking, strings by prefix and suffix. The texts and the wording are
made here. `instruction` is ours: an instruction at the very beginning that every answer has to obey. No torch here.
"""

import random
import string
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from kvbench.texts.drafts import Draft, Haystack, Question, Task, Words
from kvbench.texts.word_lists import ADJECTIVES, NOUNS

Drawn = TypeVar("Drawn")

MOST_TURNS = 8
"""Questions that each prompt has an answer for."""
FIRST_TOKENS = 0.02
"""Share of the prompt that the instruction may take."""


def key_value(draw: random.Random, words: Words) -> Draft:
    """A list of keys with a number each; every turn asks for the number of another key."""
    keys = distinct(draw, MOST_TURNS, key)
    values = [number(draw) for _ in keys]
    lines = [f"The value of {name} is {value}.\n" for name, value in zip(keys, values, strict=True)]
    asked = [
        Question("", f"\nThe value of {name} is", [value], first_number=True)
        for name, value in zip(keys, values, strict=True)
    ]

    def other(others: random.Random) -> str:
        return f"The value of {new(others, key, keys)} is {number(others)}.\n"

    return listed("Here are keys and their values.\n", lines, asked, draw.random(), other)


def multi_needle(draw: random.Random, words: Words) -> Draft:
    """Numbers for words, hidden in a text; every turn asks for another word's number."""
    needles, asked = magic_numbers(draw)
    return several("", needles, "essay", asked)


def variables(draw: random.Random, words: Words) -> Draft:
    """Pairs of assignments in repeated noise, a number to a variable and the variable to another one.

    Every turn asks for the number of another second variable, so that both assignments are needed.
    """
    names = distinct(draw, 2 * MOST_TURNS, variable)
    needles: list[tuple[float, str]] = []
    asked = []
    for first, second in zip(names[::2], names[1::2], strict=True):
        value, at = number(draw), draw.random()
        needles += [(at, f"\nVAR {first} = {value}\n"), (draw.uniform(at, 1), f"\nVAR {second} = VAR {first}\n")]
        text, lead = f"\nQuestion: Which number does VAR {second} hold?", f" Answer: VAR {second} holds the number"
        asked.append(Question(text, lead, [value], first_number=True))
    return several("", [needle for _, needle in sorted(needles)], "noise", asked)


def prefix_suffix(draw: random.Random, words: Words) -> Draft:
    """A list of strings; every turn asks for the one with a given beginning and end.

    Others share the beginning or the end, and none shares both.
    """
    pairs = distinct(draw, MOST_TURNS, two_words)
    middles = [number(draw) for _ in pairs]
    lines = [f"{first}-{middle}-{last}\n" for (first, last), middle in zip(pairs, middles, strict=True)]
    asked = [
        Question("", f"\nThe string from {first} to {last} is {first}-", [f"{middle}-{last}"], space=False)
        for (first, last), middle in zip(pairs, middles, strict=True)
    ]

    def other(others: random.Random) -> str:
        first, last = new(others, two_words, pairs)
        return f"{first}-{number(others)}-{last}\n"

    return listed("Here are strings of three parts.\n", lines, asked, draw.random(), other)


def instruction(draw: random.Random, words: Words) -> Draft:
    """An instruction in the first 2% of the prompt, to begin every answer with a code word; then `multi_needle`.

    An answer that holds the code word obeys. What else it says does not count.
    """
    needles, asked = magic_numbers(draw)
    code = draw.choice(ADJECTIVES).upper()
    obeyed = [
        Question(
            f"\nQuestion: What is the special magic number for {word}?", " Answer:", [code], answer=f"{code}. {value}"
        )
        for word, value in ((one.lead.split()[-2], one.references[0]) for one in asked)
    ]
    return several(f"Begin every answer with {code}.\n", needles, "essay", obeyed, FIRST_TOKENS)


def magic_numbers(draw: random.Random) -> tuple[list[str], list[Question]]:
    """Needles with a number for a word, and a question for each."""
    needles, asked = [], []
    for word in draw.sample(NOUNS, MOST_TURNS):
        value, lead = number(draw), f"\nThe special magic number for {word} is:"
        needles.append(f"{lead} {value}.\n")
        asked.append(Question("", lead, [value], first_number=True))
    return needles, asked


def several(
    opening: str,
    needles: Sequence[str],
    haystack: Haystack | Callable[[int], str],
    asked: Sequence[Question],
    opening_share: float | None = None,
) -> Draft:
    """The draft of these questions about one text."""
    first, *further = asked
    return Draft(
        opening,
        needles,
        haystack,
        first.text,
        first.lead,
        first.references,
        first.first_number,
        answer=first.answer,
        further=further,
        space=first.space,
        opening_share=opening_share,
    )


def listed(
    opening: str, lines: Sequence[str], asked: Sequence[Question], seed: float, other: Callable[[random.Random], str]
) -> Draft:
    """A list of `lines` at random places among others that nobody asks for. other: draws one of those."""

    def items(count: int) -> str:
        draw = random.Random(seed)
        found = [other(draw) for _ in range(count)]
        for line in lines:
            found.insert(int(draw.random() * (len(found) + 1)), line)
        return "\n" + "".join(found)  # what fills up the prompt stands before it

    return several(opening, lines, items, asked)


def new(draw: random.Random, one: Callable[[random.Random], Drawn], taken: Collection[Drawn]) -> Drawn:
    """One that is not among `taken`."""
    return next(found for found in iter(lambda: one(draw), None) if found not in taken)


def distinct(draw: random.Random, count: int, one: Callable[[random.Random], Drawn]) -> list[Drawn]:
    """`count` different ones."""
    found: dict[Drawn, None] = {}
    while len(found) < count:
        found[one(draw)] = None
    return list(found)


def number(draw: random.Random) -> str:
    """Five digits."""
    return str(draw.randrange(10_000, 100_000))


def key(draw: random.Random) -> str:
    """Such as `calm-canyon-17`."""
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}-{draw.randrange(10, 100)}"


def two_words(draw: random.Random) -> tuple[str, str]:
    """Such as `copper` and `pepper`."""
    return draw.choice(NOUNS), draw.choice(NOUNS)


def variable(draw: random.Random) -> str:
    """Five capitals."""
    return "".join(draw.choices(string.ascii_uppercase, k=5))


TURN_TASKS = (
    Task("key_value", key_value, answer_tokens=12),
    Task("multi_needle", multi_needle, answer_tokens=12),
    Task("variables", variables, answer_tokens=12),
    Task("prefix_suffix", prefix_suffix, answer_tokens=16),
    Task("instruction", instruction, answer_tokens=16),
)
