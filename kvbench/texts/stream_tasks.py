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
    """Sums of several people, one after another, each with its total at its end; then all totals are asked for.

    A person's total stands once in the working-out: the first after about an eighth of it, the last after four fifths.
    """

    opening = "Six people count their marbles. Every line adds some; a total follows the last one.\n"
    people = 6
    counted = 0.8
    """Share of the working-out after which the last person's total is written."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.names = draw.sample(FIRST_NAMES, self.people)
        self.totals: dict[str, int] = {}
        self.sum = 0

    def line(self, share: float) -> str:
        if not self.unwritten:
            return "\nAll marbles are counted."
        name = self.names[len(self.totals)]
        if self.sum and share >= self.counted * (len(self.totals) + 1) / self.people:
            self.totals[name], self.sum = self.sum, 0
            return f"\nTotal of {name}: {self.totals[name]}"
        before, more = self.sum, self.draw.randrange(1, 10)
        self.sum += more
        return f"\n{name}: {before} + {more} = {self.sum}"

    @property
    def unwritten(self) -> int:
        return self.people - len(self.totals)

    def asked(self) -> list[tuple[str, str]]:
        names = self.draw.sample(self.names, self.people)
        return [(f"\nTotal of {name}:", f" {self.totals[name]}") for name in names]


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
    """A table of moves, then a walk through half of the places; then the moves from the other half are asked for."""

    opening = "Every place leads to another place. First all ways are listed, then a walk.\n"
    places = 16

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        names = draw.sample(NOUNS, self.places)
        self.visited, self.others = names[: self.places // 2], names[self.places // 2 :]
        # The walk goes round through the first half.
        self.table = {place: self.visited[i - 1] for i, place in enumerate(self.visited)}
        self.table |= {place: draw.choice(self.visited) for place in self.others}
        self.unlisted = draw.sample(names, len(names))
        self.here, self.steps = self.visited[0], 0

    def line(self, share: float) -> str:
        if self.unlisted:
            place = self.unlisted.pop()
            return f"\nFrom {place} go to {self.table[place]}."
        self.steps += 1
        before, self.here = self.here, self.table[self.here]
        return f"\nStep {self.steps}: {before} to {self.here}."

    @property
    def unwritten(self) -> int:
        return len(self.unlisted)

    def asked(self) -> list[tuple[str, str]]:
        asked = self.draw.sample(self.others, len(self.others))
        return [(f"\nFrom {place} go to", f" {self.table[place]}") for place in asked]


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
