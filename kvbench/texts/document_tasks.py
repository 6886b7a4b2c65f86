"""Questions about made-up documents, some of which hold the answer: after RULER's `qa_1` and `qa_2`, offline.

RULER (Hsieh et al., 2024, arXiv:2404.06654) hides the paragraphs of SQuAD and HotpotQA questions among paragraphs of
other questions. Here the documents are short records of persons and companies, drawn from word lists, so that no model
can know an answer. No torch here.
"""

import random
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvbench.texts.drafts import Draft, Words
from kvbench.texts.word_lists import (
    ADJECTIVES,
    COMPANY_KINDS,
    FIRST_NAMES,
    JOBS,
    LAST_NAMES,
    NOUNS,
    PRODUCTS,
    TOWN_KINDS,
)

OPENING = (
    "Answer the question from the given documents. Give the answer only, without any other words.\n\nThe documents:\n"
)


@dataclass
class Names:
    """Draws names that are not among `taken`. With `taken` None each name is drawn at most once."""

    draw: random.Random
    taken: Collection[str] | None = None
    used: set[str] = field(default_factory=set)

    def town(self) -> str:
        """Such as `Calm Copper Falls`."""
        return self._new(lambda: f"{self._any(ADJECTIVES).title()} {self._any(NOUNS).title()} {self._any(TOWN_KINDS)}")

    def person(self) -> str:
        """Such as `Ada B. Keller`."""
        initials = string.ascii_uppercase
        return self._new(lambda: f"{self._any(FIRST_NAMES)} {self._any(initials)}. {self._any(LAST_NAMES)}")

    def company(self) -> str:
        """Such as `Amber and Quartz Mills`."""
        return self._new(
            lambda: f"{' and '.join(map(str.title, self.draw.sample(NOUNS, 2)))} {self._any(COMPANY_KINDS)}"
        )

    def _any(self, words: Sequence[str]) -> str:
        return self.draw.choice(words)

    def _new(self, name: Callable[[], str]) -> str:
        taken = self.used if self.taken is None else self.taken
        found = next(drawn for drawn in iter(name, None) if drawn not in taken)
        self.used.add(found)
        return found


@dataclass(frozen=True)
class Person:
    """The record of a person."""

    name: str
    town: str
    company: str
    text: str


@dataclass(frozen=True)
class Company:
    """The record of a company. town: where its head office is."""

    name: str
    town: str
    founder: str
    text: str


def person(names: Names, name: str | None = None, company: str | None = None) -> Person:
    """A person with what is not given drawn."""
    name, company, town = name or names.person(), company or names.company(), names.town()
    job, year = names.draw.choice(JOBS), names.draw.randrange(1930, 2000)
    text = f"{name} was born in the town of {town} in {year}. {name} is a {job} and works for {company}."
    return Person(name, town, company, text)


def company(names: Names, name: str | None = None) -> Company:
    """A company with what is not given drawn."""
    name, founder, town = name or names.company(), names.person(), names.town()
    product, year = names.draw.choice(PRODUCTS), names.draw.randrange(1850, 1990)
    text = (
        f"{name} makes {product}. {founder} founded {name} in {year}. "
        f"The head office of {name} is in the town of {town}."
    )
    return Company(name, town, founder, text)


def one_hop(draw: random.Random, words: Words) -> Draft:
    """`qa_one_hop`: one document holds the answer: a birthplace, an employer or the town of a head office."""
    names = Names(draw)
    kind = draw.choice(("birthplace", "employer", "head office"))
    if kind == "head office":
        firm = company(names)
        question, lead = (
            f"In which town is the head office of {firm.name}?",
            f"The head office of {firm.name} is in the",
        )
        return _draft(draw, names, [firm.text], question, f"{lead} town of", firm.town)
    one = person(names)
    if kind == "employer":
        question, lead = f"Which company does {one.name} work for?", f"{one.name} works for"
        return _draft(draw, names, [one.text], question, lead, one.company)
    question, lead = f"In which town was {one.name} born?", f"{one.name} was born in the town of"
    return _draft(draw, names, [one.text], question, lead, one.town)


def two_hops(draw: random.Random, words: Words) -> Draft:
    """`qa_two_hop`: two documents hold the answer: the first one names the person or company of the second one."""
    names = Names(draw)
    if draw.random() < 0.5:
        one = person(names)
        firm = company(names, one.company)
        question = f"In which town is the head office of the company that {one.name} works for?"
        return _draft(draw, names, [one.text, firm.text], question, "That head office is in the town of", firm.town)
    firm = company(names)
    one = person(names, firm.founder)
    question = f"In which town was the founder of {firm.name} born?"
    return _draft(draw, names, [firm.text, one.text], question, "The founder was born in the town of", one.town)


def _draft(
    draw: random.Random, names: Names, needles: Sequence[str], question: str, lead: str, reference: str
) -> Draft:
    seed, taken = draw.random(), frozenset(names.used)

    def items(count: int) -> str:
        """`count` other documents, with the needles at random places among them, all numbered."""
        others = random.Random(seed)
        documents = list(_others(Names(others, taken), count))
        for needle in needles:
            documents.insert(int(others.random() * (len(documents) + 1)), needle)
        return "".join(f"\nDocument {i}:\n{text}\n" for i, text in enumerate(documents, 1))

    single = needles[0] if len(needles) == 1 else None
    asked = f"\nQuestion: {question}"
    return Draft(OPENING, needles, items, asked, f" Answer: {lead}", [reference], answer_needle=single)


def _others(names: Names, count: int) -> Iterator[str]:
    for i in range(count):
        yield company(names).text if i % 2 else person(names).text
