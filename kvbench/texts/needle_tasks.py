"""Retrieval tasks: a value is hidden in a long text and asked for. RULER: Hsieh et al., 2024, arXiv:2404.06654.

Names and definitions are RULER's, so that published numbers compare with ours: what is hidden, in which text, how
often, the length of an answer, and what counts. Three things are ours: the wording; needles stand at the depth asked
for where there is one; an answer that holds a value inside a longer word or number does not count.

Three tasks are ours. `single_number`, five digits asked for as a completion, is one that small base models can do.
`qa_one_hop` and `qa_two_hop` take the places of RULER's `qa_1` (SQuAD) and `qa_2` (HotpotQA): the questions are of the
same kind, the documents are made up (`kvbench.texts.document_tasks`), so the names differ. Tasks with several questions
about one text: see `kvbench.texts.turn_tasks`. No torch here.
"""

import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvbench.texts.document_tasks import one_hop, two_hops
from kvbench.texts.drafts import NOISE, Draft, Haystack, Kind, Question, Task, Words
from kvbench.texts.turn_tasks import TURN_TASKS
from kvbench.texts.word_lists import ADJECTIVES, NOUNS
from kvbench.texts.word_tasks import common_words, frequent_words

PLURALS = {"number": "numbers", "word": "words", "uuid": "uuids"}


def single_number(draw: random.Random, words: Words) -> Draft:
    """Five digits for a word, asked for as a completion."""
    word, value = draw.choice(NOUNS), str(draw.randrange(10_000, 100_000))
    lead = f"\nThe special magic number for {word} is:"
    pin = f"{lead} {value}.\n"
    return Draft("", [pin], "essay", "", lead, [value], first_number=True, answer_needle=pin)


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
            answer_needle=needle(wanted, asked[0], pairs[asked[0]][0]) if one else None,
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
        Task("cwe", common_words, answer_tokens=120, pool=True),
        Task("fwe", frequent_words, answer_tokens=50),
        Task("qa_one_hop", one_hop, answer_tokens=32),
        Task("qa_two_hop", two_hops, answer_tokens=32),
        *TURN_TASKS,
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


def score(asked: Question, answer: str) -> float:
    """Share of what the question asks for that the answer holds."""
    if asked.first_number:
        return float(is_hit(answer, asked.references[0]))
    return recall(answer, asked.references)


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
