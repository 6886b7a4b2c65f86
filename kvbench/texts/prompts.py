"""From a task to token ids: a prompt of an exact length, with everything that was hidden in it still whole."""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from kvbench.errors import UserError
from kvbench.texts.drafts import NOISE, Draft, Question, Task, Words
from kvbench.texts.needle_tasks import TASKS
from kvbench.texts.templates import between_turns, template_of

VOCABULARY_TOKENS = 100_000
"""Tokens of the text whose words are used where a task wants words."""


class NeedleSettings(Protocol):
    """Settings that prompts are made from: see `kvbench.measures.needle.Needle`. name: of the measure, for messages."""

    name: ClassVar[str]

    @property
    def lengths(self) -> list[int]: ...
    @property
    def depths(self) -> list[float]: ...
    @property
    def samples(self) -> int: ...
    @property
    def tasks(self) -> Sequence[str]: ...
    @property
    def template(self) -> str: ...
    @property
    def values(self) -> Literal["task", "number", "word", "uuid"]: ...
    @property
    def answer_tokens(self) -> int | None: ...


@dataclass(frozen=True)
class Turn:
    """A question as tokens. right: tokens of the right answer and of what separates it from the next question.
    answer_tokens: length of the answer."""

    asked: Question
    question: list[int]
    right: list[int]
    answer_tokens: int


@dataclass(frozen=True)
class Prompt:
    """ids: context tokens, exactly `length` of them. turns: the questions that follow, one or several. depth: None
    where what is hidden stands at a place of its own. needle_span: first token and the one after the last of the
    sentence that holds the first answer; None where an answer takes several sentences, or a count.
    """

    task: Task
    length: int
    depth: float | None
    sample: int
    ids: list[int]
    draft: Draft
    turns: tuple[Turn, ...]
    needle_span: tuple[int, int] | None = None

    @property
    def question(self) -> list[int]:
        """Tokens of the first question."""
        return self.turns[0].question

    @property
    def answer_tokens(self) -> int:
        """Length of the first answer."""
        return self.turns[0].answer_tokens

    @property
    def asked_tokens(self) -> int:
        """Positions that the first question and its answer take."""
        return len(self.question) + self.answer_tokens


def check_prompts(
    tokenizer: Any,
    tokens: Tensor,
    seed: int,
    settings: NeedleSettings,
    max_positions: int | None,
    bos: Sequence[int] = (),
    asked_tokens: Callable[[Prompt], int] = lambda prompt: prompt.asked_tokens,
) -> dict[int, list[Prompt]]:
    """All prompts, by length. Raises UserError for one that cannot be made or does not fit the model's positions.

    asked_tokens: positions that a prompt's questions and answers take.
    """
    made, name = {}, settings.name
    for length in settings.lengths:
        made[length] = prompts = make_prompts(tokenizer, tokens, seed, settings, length, bos)
        needed = length + max(map(asked_tokens, prompts))
        if max_positions is not None and needed > max_positions:
            raise UserError(
                f"{name}.lengths={length} needs {needed} positions with question and answer, and the model has "
                f"{max_positions}; type {name}.lengths={length - needed + max_positions} or less"
            )
    return made


def make_prompts(
    tokenizer: Any, tokens: Tensor, seed: int, settings: NeedleSettings, length: int, bos: Sequence[int] = ()
) -> list[Prompt]:
    """All prompts of a length, task by task and depth by depth. bos: what they begin with; a chat template brings its
    own."""
    maker = Maker(tokenizer, tokens, seed, settings, length, bos)
    tasks = [TASKS[name] for name in settings.tasks]
    return [maker.prompt(task, depth, sample) for task in tasks for depth, sample in places(task, settings)]


def places(task: Task, settings: NeedleSettings) -> Iterator[tuple[float | None, int]]:
    """Depth and number of each prompt; a task without depths has as many prompts in all."""
    for i, depth in enumerate(settings.depths):
        for sample in range(settings.samples):
            yield (depth, sample) if task.grid else (None, i * settings.samples + sample)


class Maker:
    """Makes the prompts of one length, the same for every method, from a seed.

    Raises UserError where the text or the length is too short, or where what is hidden does not survive the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, tokens: Tensor, seed: int, settings: NeedleSettings, length: int, bos: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.tokens, self.seed, self.length = tokenizer, tokens, seed, length
        self.begin = list(bos) if settings.template == "base" else []
        self.name, self.kind = settings.name, settings.template
        self.template = template_of(tokenizer, settings.template)
        wanted = None if settings.values == "task" else settings.values
        pool = [name for name in settings.tasks if TASKS[name].pool]
        self.words = Words(self._vocabulary(pool) if pool else (), length, wanted)
        self.most_tokens = settings.answer_tokens

    def prompt(self, task: Task, depth: float | None, sample: int) -> Prompt:
        place = f"{self.seed}/{self.length}/{depth}/{sample}"
        draw = random.Random(place if task.name == "single_number" else f"{place}/{task.name}/{self.words.values}")
        draft = task.draft(draw, self.words)
        head = self.begin + self.encode(self.template.before + draft.opening)
        if draft.opening_share is not None and len(head) > draft.opening_share * self.length:
            raise UserError(
                f"{self.name}.lengths={self.length}: the {len(head)} tokens of the task's instruction are more than "
                f"{draft.opening_share:.0%} of the prompt; type {self.name}.lengths="
                f"{math.ceil((len(head) + 5) / draft.opening_share)} or more"
            )
        room = self.length - len(head)
        if callable(draft.haystack):
            body = self._of_items(draft, draft.haystack, room)
        else:
            body = self._of_stretch(draft, draw, room, depth)
        ids = head + body
        text = self.tokenizer.decode(ids)
        self._check_whole(draft, ids, text)
        span = None if draft.answer_needle is None else self._span(draft.answer_needle.strip(), ids, text)
        between = between_turns(self.tokenizer, self.kind) if draft.further else ""
        turns = tuple(self._turn(task, question, between) for question in draft.questions)
        return Prompt(task, self.length, depth, sample, ids, draft, turns, span)

    def _turn(self, task: Task, asked: Question, between: str) -> Turn:
        question = self.encode(asked.text + self.template.after + asked.lead)
        right = self.encode(asked.right_answer + between)
        return Turn(asked, question, right, self._answer_tokens(task, asked))

    def _answer_tokens(self, task: Task, asked: Question) -> int:
        """As many as RULER, or as the setting allows, and never fewer than all references take."""
        tokens = max(task.answer_tokens, len(self.encode(", ".join(asked.references))))
        if self.most_tokens is None:
            return tokens
        return min(tokens, max(self.most_tokens, len(self.encode(asked.right_answer.strip()))))

    def _span(self, needle: str, ids: list[int], text: str) -> tuple[int, int]:
        """The fewest consecutive tokens that hold the needle, as the first one and the one after the last."""
        before = text.index(needle)
        near = [len(self.encode(text[:end])) for end in (before, before + len(needle))]
        start, stop, slack = *near, 4  # text that is encoded again may differ by some tokens
        while needle not in self.tokenizer.decode(ids[start:stop]):
            start, stop, slack = max(0, near[0] - slack), min(len(ids), near[1] + slack), 2 * slack
        while needle in self.tokenizer.decode(ids[start + 1 : stop]):
            start += 1
        while needle in self.tokenizer.decode(ids[start : stop - 1]):
            stop -= 1
        return start, stop

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _of_stretch(self, draft: Draft, draw: random.Random, room: int, depth: float | None) -> list[int]:
        """A stretch of text, or repeated noise, cut open for the needles: at the depth, or anywhere in order."""
        pins = [self.encode(needle) for needle in draft.needles]
        room -= sum(map(len, pins))
        if room < 1:
            raise UserError(
                f"{self.name}.lengths={self.length} has no room for the needle; type {2 * (self.length - room)} or more"
            )
        if draft.haystack == "noise":
            unit = self.encode(NOISE)
            hay = (unit * (room // len(unit) + 1))[:room]
        else:
            hay = self._text(draw, room)
        cuts = sorted(round(depth * room) if depth is not None else draw.randrange(room + 1) for _ in pins)
        pieces: list[int] = []
        for pin, start, stop in zip(pins, [0, *cuts], cuts, strict=False):
            pieces += hay[start:stop] + pin
        return pieces + hay[cuts[-1] :]

    def _text(self, draw: random.Random, room: int) -> list[int]:
        if room > len(self.tokens):
            raise UserError(
                f"{self.name}.lengths={self.length} needs {room} tokens of text and there are {len(self.tokens)}; "
                "type less"
            )
        start = draw.randrange(0, len(self.tokens) - room + 1)
        found: list[int] = self.tokens[start : start + room].tolist()
        return found

    def _of_items(self, draft: Draft, items: Callable[[int], str], room: int) -> list[int]:
        """As many items as fit; the rest, shorter than an item, is filled with noise in front."""
        body = self.encode(items(0))
        if len(body) > room:
            raise UserError(
                f"{self.name}.lengths={self.length} has no room for the shortest list of this task; type "
                f"{self.name}.lengths={self.length - room + 2 * len(body)} or more"
            )
        count, step = 0, 1
        while step:  # doubled as long as it fits, then halved
            longer = self.encode(items(count + step))
            if len(body) < len(longer) <= room:
                count, body, step = count + step, longer, 2 * step
            else:
                step //= 2
        unit, missing = self.encode(NOISE), room - len(body)
        return (unit * (missing // len(unit) + 1))[:missing] + body

    def _check_whole(self, draft: Draft, ids: list[int], text: str) -> None:
        hidden = [needle.strip() for needle in draft.needles] or draft.references
        broken = [needle for needle in hidden if needle not in text]
        if broken or len(ids) != self.length:
            came = self.tokenizer.decode(self.encode(broken[0])) if broken else text[:40]
            raise UserError(
                f"this tokenizer breaks the needle ('{' '.join(came.split())}' came back); "
                f"leave {self.name} out: measure='[perplexity,memory,latency]'"
            )

    def _vocabulary(self, tasks: Sequence[str]) -> list[str]:
        """Lower-case words of the text, each once, in alphabetical order."""
        text = self.tokenizer.decode(self.tokens[:VOCABULARY_TOKENS].tolist())
        words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))
        if len(words) < 40:
            names = ", ".join(tasks)
            raise UserError(
                f"{self.name}.tasks=[{names}] needs 40 different words and the text has {len(words)}; leave {names} out"
            )
        return words
