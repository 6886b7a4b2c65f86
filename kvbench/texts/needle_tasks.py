"""Retrieval tasks: a value is hidden in a long text and asked for. RULER: Hsieh et al., 2024, arXiv:2404.06654.

Names and definitions are RULER's, so that published numbers compare with ours: what is hidden, in which text, how
often, the length of an answer, and what counts. Three things are ours: the wording; needles stand at the depth asked
for where there is one; an answer that holds a value inside a longer word or number does not count. `single_number`,
five digits asked for as a completion, is a task of our own that small base models can do. No torch here.
"""

import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["number", "word", "uuid"]
Haystack = Literal["essay", "noise"]

NOUNS = (
    "amber",
    "anchor",
    "basket",
    "beacon",
    "candle",
    "canyon",
    "cobalt",
    "copper",
    "ember",
    "falcon",
    "garden",
    "harbor",
    "island",
    "jasper",
    "lantern",
    "meadow",
    "orchid",
    "pepper",
    "quartz",
    "raven",
    "saddle",
    "silver",
    "timber",
    "valley",
    "walnut",
    "willow",
    "winter",
    "yellow",
    "zenith",
    "marble",
)
ADJECTIVES = (
    "ancient",
    "brave",
    "calm",
    "distant",
    "eager",
    "faint",
    "gentle",
    "hollow",
    "idle",
    "jolly",
    "keen",
    "lively",
    "mellow",
    "narrow",
    "odd",
    "proud",
    "quiet",
    "rapid",
    "tidy",
    "upper",
    "vivid",
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The repeated sentences of passkey retrieval (Mohtashami and Jaggi, 2023, arXiv:2305.16300)."""

PLURALS = {"number": "numbers", "word": "words", "uuid": "uuids"}


@dataclass(frozen=True)
class Draft:
    """A prompt in words, before it is cut to a length in tokens.

    opening: what comes first. needles: sentences to hide. haystack: the text that they are hidden in, or a function
    that gives a text of n items with the needles among them. question, lead: what follows, the lead being the answer's
    beginning. references: what must come back. first_number: only the answer's first number counts.
    """

    opening: str
    needles: Sequence[str]
    haystack: Haystack | Callable[[int], str]
    question: str
    lead: str
    references: Sequence[str]
    first_number: bool = False


@dataclass(frozen=True)
class Task:
    """A retrieval task. draft: the prompt of a random state. grid: whether its needle goes to each asked-for depth.

    answer_tokens: what RULER lets a model say, 128 where it names nothing else.
    """

    name: str
    draft: Callable[[random.Random, "Words"], Draft]
    grid: bool = False
    answer_tokens: int = 128


@dataclass(frozen=True)
class Words:
    """What a draft is made from: the words of the text, the length asked for, and the kind of value to hide (None:
    the task's own)."""

    pool: Sequence[str]
    length: int
    values: Kind | None = None


def single_number(draw: random.Random, words: Words) -> Draft:
    """Five digits for a word, asked for as a completion."""
    word, value = draw.choice(NOUNS), str(draw.randrange(10_000, 100_000))
    lead = f"\nThe special magic number for {word} is:"
    return Draft("", [f"\nThe special magic number for {word} is: {value}.\n"], "essay", "", lead, [value], True)


def niah(
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    kind: Kind = "number",
    key_kind: Kind = "word",
    haystack: Haystack | Literal["needles"] = "essay",
) -> Callable[[random.Random, Words], Draft]:
    """Needles in a haystack: `values` values for each of `keys` keys, and `queries` of the keys asked for.

    The haystack "needles" consists of others of the same kind that nobody asks for.
    """

    def draft(draw: random.Random, words: Words) -> Draft:
        wanted = words.values or kind
        names = distinct(draw, key_kind, keys)
        pairs = {name: distinct(draw, wanted, values) for name in names}
        asked = draw.sample(names, queries)
        needles = [needle(wanted, name, value) for name in names for value in pairs[name]]
        hay = haystack if haystack != "needles" else among_needles(draw.random(), needles, wanted, key_kind, names)
        one = queries * values == 1
        what, them = wanted if one else PLURALS[wanted], listed(asked)
        return Draft(
            f"Special magic {PLURALS[wanted]} are hidden in the text below. Remember them for later.\n",
            needles,
            hay,
            f"\n{'What is' if one else 'What are all'} the special magic {what} for {them} in the text above?",
            f" The special magic {what} for {them} in the text above {'is' if one else 'are'}",
            [value for name in asked for value in pairs[name]],
        )

    return draft


def among_needles(
    seed: float, needles: Sequence[str], kind: str, key_kind: str, taken: Sequence[str]
) -> Callable[[int], str]:
    """A haystack of n other needles, whose keys are not `taken`, with `needles` at random places."""

    def items(count: int) -> str:
        draw = random.Random(seed)
        keys = (key for key in iter(lambda: drawn(draw, key_kind), None) if key not in taken)
        lines = [needle(kind, next(keys), drawn(draw, kind)) for _ in range(count)]
        for line in needles:
            lines.insert(int(draw.random() * (count + 1)), line)
        return "".join(lines)

    return items


class Chain(NamedTuple):
    """A chain of variables with one value: each is assigned the variable before it."""

    names: list[str]
    value: str

    @property
    def statements(self) -> list[str]:
        first, *others = self.names
        later = [f"\nVAR {name} = VAR {source}\n" for source, name in zip(self.names, others, strict=False)]
        return [f"\nVAR {first} = {self.value}\n", *later]

    @property
    def question(self) -> str:
        return f"\nQuestion: Which variables have the value {self.value} in the text above?"

    @property
    def lead(self) -> str:
        return f" Answer: The {len(self.names)} variables with the value {self.value}, along the chain, are:"


def chain(draw: random.Random, hops: int) -> Chain:
    names = ["".join(draw.choices(string.ascii_uppercase, k=5)) for _ in range(hops + 1)]
    return Chain(names, str(draw.randrange(10_000, 100_000)))


def variable_tracking(draw: random.Random, words: Words, hops: int = 4) -> Draft:
    """RULER's `vt`: a chain of `hops` assignments, of which all names are asked for, after a solved example."""
    shown, hidden = chain(draw, hops), chain(draw, hops)
    opening = "Follow the chain of variable assignments that is hidden in the text.\n\n"
    example = f"{NOISE}{''.join(shown.statements)}{shown.question}{shown.lead} {' '.join(shown.names)}\n\n"
    return Draft(opening + example + opening, hidden.statements, "noise", hidden.question, hidden.lead, hidden.names)


def common_words(draw: random.Random, words: Words, wanted: int = 10) -> Draft:
    """RULER's `cwe`: of a numbered list of words those that appear most often.

    Ten words thirty times each among others three times; below 4,096 tokens six times and once. Before it a solved
    example of 40 words, ten times and three times; of 20, three times and once.
    """
    long = words.length >= 4096
    often, seldom = (30, 3) if long else (6, 1)
    pool = draw.sample(list(words.pool), len(words.pool))
    common, others = pool[:wanted], pool[wanted:]

    def items(count: int) -> str:
        return numbered([*(common * often), *(others[:count] * seldom)], seed)

    seed, question = draw.random(), f"\nQuestion: Which {wanted} words appear most often in the list above?"
    lead = f" Answer: The {wanted} words that appear most often are:"
    shown = draw.sample(pool, (4 if long else 2) * wanted)
    example = numbered([*(shown[:wanted] * (10 if long else 3)), *(shown[wanted:] * seldom)], seed)
    opening = "Below is a numbered list of words. Some of them appear more often than others. Remember those.\n"
    solved = f"{opening}{example}{question}{lead} {numbered(shown[:wanted])}\n\n"
    return Draft(solved + opening, [], items, question, lead, common)


def numbered(words: Sequence[str], seed: float | None = None) -> str:
    """`1. here 2. there`, in an order drawn from the seed."""
    order = list(words)
    if seed is not None:
        random.Random(seed).shuffle(order)
    return " ".join(f"{i}. {word}" for i, word in enumerate(order, 1))


TASKS = {
    task.name: task
    for task in (
        Task("single_number", single_number, grid=True, answer_tokens=12),
        Task("niah_single_1", niah(haystack="noise"), grid=True),
        Task("niah_single_2", niah(), grid=True),
        Task("niah_single_3", niah(kind="uuid"), grid=True),
        Task("niah_multikey_1", niah(keys=4)),
        Task("niah_multikey_2", niah(haystack="needles")),
        Task("niah_multikey_3", niah(kind="uuid", key_kind="uuid", haystack="needles")),
        Task("niah_multivalue", niah(values=4)),
        Task("niah_multiquery", niah(keys=4, queries=4)),
        Task("vt", variable_tracking, answer_tokens=30),
        Task("cwe", common_words, answer_tokens=120),
    )
}


def needle(kind: str, key: str, value: str) -> str:
    return f"\nOne of the special magic {PLURALS[kind]} for {key} is: {value}.\n"


def drawn(draw: random.Random, kind: str) -> str:
    """One value: seven digits, an adjective and a noun, or a UUID."""
    if kind == "number":
        return str(draw.randrange(1_000_000, 10_000_000))
    if kind == "uuid":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def distinct(draw: random.Random, kind: str, count: int) -> list[str]:
    """`count` different values."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[drawn(draw, kind)] = None
    return list(found)


def listed(names: Sequence[str]) -> str:
    """`a, b, and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def recall(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer holds, each standing alone, in any case (RULER's string match)."""
    alone = (rf"(?<![\w-])(?<!\d[.,]){re.escape(reference)}(?![\w-])(?![.,]\d)" for reference in references)
    return sum(re.search(pattern, answer, re.IGNORECASE) is not None for pattern in alone) / len(references)


def is_hit(answer: str, value: str) -> bool:
    """Whether the first number in the answer is the value and stands alone.

    Digits inside a word (65125th) or inside another number (65125.5, 65,125, -65125) do not count, nor does wording.
    """
    first = re.search(r"[-+]?(?:\w[\w.,]*)?\d[\w.,-]*", answer)
    return first is not None and first.group().rstrip(".,-") == value
