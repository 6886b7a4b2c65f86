"""Frequent words of a coded text: their numbers are those of RULER's Zipf distribution."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise

import pytest
from scipy.special import zeta

from kvbench.texts.drafts import Words
from kvbench.texts.word_tasks import SHORTEST, frequent_words


@pytest.mark.parametrize("count", [0, 1, 7, 100, 3_000])
def test_ranks_occur_as_often_as_rulers_formula_says(count: int) -> None:
    draft = frequent_words(random.Random(0), Words((), 1024))
    assert callable(draft.haystack)
    found = Counter(draft.haystack(count).split())
    total = SHORTEST + 2 * count
    expected = [int(total * rank**-2.0 / zeta(2.0)) for rank in range(1, 2_001)]
    assert sorted(found.values(), reverse=True) == [number for number in expected if number]
    (noise, _), *common = found.most_common(5)
    assert noise == "..."
    assert [word for word, _ in common[:3]] == list(draft.references)
    assert common[2][1] > common[3][1]  # the third answer is no tie with the word after it
    assert all(re.fullmatch("[a-z]{6}", word) for word in found if word != "...")


def test_more_words_always_make_a_longer_text() -> None:
    draft = frequent_words(random.Random(1), Words((), 1024))
    assert callable(draft.haystack)
    lengths = [len(draft.haystack(count).split()) for count in range(200)]
    assert all(longer > shorter for shorter, longer in pairwise(lengths))


def test_the_text_follows_from_the_seed_alone() -> None:
    def text(seed: int) -> str:
        draft = frequent_words(random.Random(seed), Words((), 1024))
        assert callable(draft.haystack)
        return draft.haystack(50)

    assert text(1) == text(1) != text(2)
