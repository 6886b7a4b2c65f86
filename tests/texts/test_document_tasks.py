"""Questions about made-up documents: each can be answered from its documents and from nothing else."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from kvbench.texts.document_tasks import Names, one_hop, two_hops
from kvbench.texts.drafts import Draft, Words

WORDS = Words((), 1024)
COUNT = 60


def drafted(task: Callable[[random.Random, Words], Draft], seed: int) -> tuple[Draft, list[str]]:
    """A draft and the texts of its documents, `COUNT` others among them."""
    draft = task(random.Random(seed), WORDS)
    assert callable(draft.haystack)
    text = draft.haystack(COUNT)
    assert [int(number) for number in re.findall(r"Document (\d+):", text)] == list(
        range(1, COUNT + len(draft.needles) + 1)
    )
    return draft, re.findall(r"Document \d+:\n(.+)\n", text)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("task", [one_hop, two_hops])
def test_only_the_hidden_documents_hold_the_answer(task: Callable[..., Draft], seed: int) -> None:
    draft, documents = drafted(task, seed)
    (reference,) = draft.references
    assert [text for text in documents if text in draft.needles] == sorted(draft.needles, key=documents.index)
    assert reference not in draft.question + draft.lead
    holding = [text for text in documents if reference in text]
    assert holding and set(holding) <= set(draft.needles)


@pytest.mark.parametrize("seed", range(30))
def test_one_hop_asks_about_the_subject_of_one_document(seed: int) -> None:
    draft, documents = drafted(one_hop, seed)
    (needle,) = draft.needles
    assert draft.answer_needle == needle
    subject = re.match(r"(.+?) (?:was born|makes)", needle)
    assert subject is not None and subject[1] in draft.question
    assert sum(subject[1] in text for text in documents) == 1


@pytest.mark.parametrize("seed", range(30))
def test_two_hops_need_both_documents(seed: int) -> None:
    """The question names the subject of the first one only, which names the subject of the second one."""
    draft, documents = drafted(two_hops, seed)
    first, second = draft.needles
    subjects = [str(re.match(r"(.+?) (?:was born|makes)", text)[1]) for text in (first, second)]  # type: ignore[index]
    assert draft.answer_needle is None
    assert subjects[0] in draft.question and subjects[1] not in draft.question
    assert subjects[1] in first and draft.references[0] not in first
    assert draft.references[0] in second
    assert sum(subjects[0] in text for text in documents) <= 2


def test_documents_follow_from_the_seed_alone() -> None:
    assert drafted(two_hops, 3)[1] == drafted(two_hops, 3)[1] != drafted(two_hops, 4)[1]
    assert len({drafted(one_hop, seed)[0].references[0] for seed in range(20)}) == 20


def test_there_are_documents_for_any_length() -> None:
    """More of them than there are different names of companies."""
    draft = one_hop(random.Random(0), WORDS)
    assert callable(draft.haystack)
    assert draft.haystack(20_000).count("\nDocument ") == 20_001


def test_names_of_a_question_do_not_repeat_and_other_documents_hold_none_of_them() -> None:
    names = Names(random.Random(0))
    for kind in (names.person, names.town, names.company):
        found = [kind() for _ in range(3_000)]
        assert len(set(found)) == 3_000
    again = Names(random.Random(0), taken=set(found))
    assert not {again.company() for _ in range(3_000)} & set(found)
