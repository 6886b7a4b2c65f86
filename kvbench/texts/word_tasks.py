"""Retrieval tasks without a needle: the most frequent words of a list. RULER: Hsieh et al., 2024, arXiv:2404.06654."""

import math
import random
import string
from collections.abc import Sequence

from kvbench.texts.drafts import Draft, Words

ALPHA = 2.0
"""Exponent of the Zipf distribution of `fwe`."""
ZETA = math.pi**2 / 6
"""Riemann's zeta function at ALPHA: the sum of rank**-ALPHA over all ranks."""
CODED_WORDS = 2000
CODED_LETTERS = 6
SHORTEST = 60
"""Words of the shortest coded text; in any longer text the ranks 2, 3 and 4 occur more often than rank 5."""


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
    return Draft(solved + opening, [], items, question, lead, common, answer=numbered(common))


def frequent_words(draw: random.Random, words: Words) -> Draft:
    """RULER's `fwe`: the three most frequent words of a coded text, whose frequencies follow Zipf's law.

    Of n words rank r occurs int(n * r**-2 / zeta(2)) times. Rank 1 is noise, written as dots; ranks 2, 3 and 4 are
    asked for. Words are six random letters, in random order.
    """
    coded: dict[str, None] = {}
    while len(coded) < CODED_WORDS:
        coded["".join(draw.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
    ranked, seed = ["...", *list(coded)[1:]], draw.random()

    def items(count: int) -> str:
        total = SHORTEST + 2 * count  # two more words always lengthen the text
        listed = [word for rank, word in enumerate(ranked, 1) for _ in range(int(total * rank**-ALPHA / ZETA))]
        random.Random(seed).shuffle(listed)
        return "\n" + " ".join(listed)

    return Draft(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequent coded "
        "words.\n",
        [],
        items,
        "\nQuestion: Ignore the dots '...'. What are the three most frequent words in the above coded text?",
        " Answer: According to the coded text above, the three most frequent words are:",
        ranked[1:4],
    )


def numbered(words: Sequence[str], seed: float | None = None) -> str:
    """`1. here 2. there`, in an order drawn from the seed."""
    order = list(words)
    if seed is not None:
        random.Random(seed).shuffle(order)
    return " ".join(f"{i}. {word}" for i, word in enumerate(order, 1))
