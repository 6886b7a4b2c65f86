"""When a generated text loops."""

from collections.abc import Sequence

LONGEST_BLOCK = 64
"""Tokens of the longest block that counts as one that is repeated."""
FEWEST_BLOCKS = 3
FEWEST_TOKENS = 24


def loop_start(tokens: Sequence[int]) -> int | None:
    """The first token of the loop that the text ends in; None where it ends in none.

    A text loops where it ends in a block of at most LONGEST_BLOCK tokens, repeated: FEWEST_BLOCKS times or more, and
    FEWEST_TOKENS tokens or more in all. The last repetition may be cut off.
    """
    starts = []
    for block in range(1, min(LONGEST_BLOCK, len(tokens) // FEWEST_BLOCKS) + 1):
        start = len(tokens) - block
        while start > 0 and tokens[start - 1] == tokens[start - 1 + block]:
            start -= 1
        if len(tokens) - start >= max(FEWEST_BLOCKS * block, FEWEST_TOKENS):
            starts.append(start)
    return min(starts, default=None)
