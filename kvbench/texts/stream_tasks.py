"""Tasks made by rule for long decodes: a working-out that is written line by line, then questions about it.

Each answer needs one line that was written long before. The lines are given, so every method reads the same tokens. The
tasks are synthetic: they bound what a cache still holds of its own writing, and say nothing about reasoning. No torch
here.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from kvbench.errors import UserError
from kvbench.texts.word_lists import ADJECTIVES, FIRST_NAMES, NOUNS


class WorkingOut(Protocol):
    """A text in the making. opening: what the prompt says, the same in every sample."""

    opening: str

    def line(self, share: float) -> str:
        """The next line, begun with a newline; share: how much of the working-out has been written, 0 to 1."""
        ...

    @property
    def unwritten(self) -> int:
        """Lines that the answers need and that have not been written yet."""
        ...

    def asked(self) -> list[tuple[str, str]]:
        """Questions about all lines so far, each as the text that leads to the answer, and the right answer."""
        ...


class RunningSum:
    """Several people's sums, one addition a line; then each one's last sum is asked for.

    The last line about each person stands at another depth: the first person has no more lines after a sixth of the
    working-out, the last has lines up to its end.
    """

    opening = "Marbles are given away. Every line says how many marbles a person had, gets, and has then.\n"
    people = 6

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.sums = {name: draw.randrange(1, 10) for name in draw.sample(FIRST_NAMES, self.people)}
        self.waiting = list(self.sums)  # everyone has a line of their own first

    def line(self, share: float) -> str:
        present = list(self.sums)[min(int(share * self.people), self.people - 1) :]
        name = self.waiting.pop() if self.waiting else self.draw.choice(present)
        more = self.draw.randrange(1, 10)
        before = self.sums[name]
        self.sums[name] += more
        return f"\n{name} had {before} and gets {more}, so {name} has {self.sums[name]}."

    @property
    def unwritten(self) -> int:
        return len(self.waiting)

    def asked(self) -> list[tuple[str, str]]:
        names = self.draw.sample(list(self.sums), self.people)
        return [(f"\nIn the end {name} has", f" {self.sums[name]}") for name in names]


class ListCopy:
    """A numbered list of words as long as the working-out; then its first items are written once more."""

    opening = "A list of words is written down. Then the same list is written once more.\n\nThe list:"
    copied = 16

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.words: list[str] = []

    def line(self, share: float) -> str:
        self.words.append(self.draw.choice((*NOUNS, *ADJECTIVES)))
        return f"\n{len(self.words)}. {self.words[-1]}"

    @property
    def unwritten(self) -> int:
        return max(0, self.copied - len(self.words))

    def asked(self) -> list[tuple[str, str]]:
        items = [(f"\n{i}.", f" {word}") for i, word in enumerate(self.words[: self.copied], 1)]
        return [(f"\n\nThe list once more:{items[0][0]}", items[0][1]), *items[1:]]


class StateMachine:
    """A table of moves, then a walk that only ever goes left; then the moves to the right are asked for."""

    opening = "Every place has a way to the left and a way to the right. First all ways are listed, then a walk.\n"
    places = 8

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        names = draw.sample(NOUNS, self.places)
        left = {(place, "left"): names[i - 1] for i, place in enumerate(names)}  # the walk visits all places
        right = {(place, "right"): draw.choice([name for name in names if name != place]) for place in names}
        self.table = left | right
        self.unlisted = draw.sample(list(self.table), len(self.table))
        self.here, self.steps = names[0], 0

    def line(self, share: float) -> str:
        if self.unlisted:
            place, side = self.unlisted.pop()
            return f"\nFrom {place}, {side} leads to {self.table[place, side]}."
        self.steps += 1
        before, self.here = self.here, self.table[self.here, "left"]
        return f"\nStep {self.steps}: {before}, left, {self.here}."

    @property
    def unwritten(self) -> int:
        return len(self.unlisted)

    def asked(self) -> list[tuple[str, str]]:
        right = [(place, there) for (place, side), there in self.table.items() if side == "right"]
        self.draw.shuffle(right)
        return [(f"\nFrom {place}, right leads to", f" {there}") for place, there in right]


TASKS: dict[str, Callable[[random.Random], WorkingOut]] = {
    "running_sum": RunningSum,
    "list_copy": ListCopy,
    "state_machine": StateMachine,
}


class Written(NamedTuple):
    """A sample in tokens. ids: all of them. prompt: tokens of the opening. length: tokens of the working-out.

    answers: first token and the one after the last of each answer.
    """

    ids: list[int]
    prompt: int
    length: int
    answers: list[tuple[int, int]]


def write(tokenizer: Any, task: str, length: int, seed: int, sample: int, bos: Sequence[int] = ()) -> Written:
    """One sample with a working-out of exactly `length` tokens; newlines fill what no further line fits in.

    Raises UserError where the lines that the answers need do not fit.
    """
    made = TASKS[task](random.Random(f"{seed} {task} {length} {sample}"))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    ids = [*bos, *tokens(made.opening)]
    prompt = len(ids)
    for line in _lines(made, tokens, length):
        ids += line
    if made.unwritten:
        raise UserError(
            f"stream.lengths={length} is too short for {task} with this tokenizer: {made.unwritten} lines that the "
            f"answers need do not fit; type stream.lengths=[{2 * length}]"
        )
    answers = []
    for lead, answer in made.asked():
        ids += tokens(lead)
        answers.append((len(ids), len(ids) + len(tokens(answer))))
        ids += tokens(answer)
    return Written(ids, prompt, length, answers)


def _lines(made: WorkingOut, tokens: Callable[[str], list[int]], length: int) -> Iterator[list[int]]:
    """Lines in tokens, `length` tokens in all."""
    written, longest = 0, 0
    while length - written > longest + 2:  # sums and step numbers get longer by a token or two
        line = tokens(made.line(written / length))
        longest = max(longest, len(line))
        written += len(line)
        yield line
    yield tokens("\n")[:1] * (length - written)
