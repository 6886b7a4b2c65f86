"""Whether a tokenizer and a model's embedding belong together. This imports neither torch nor transformers."""

from __future__ import annotations

from typing import Any

from kvbench.errors import UserError


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Raise UserError where a token that prompts are made of has no row in the model's embedding.

    BOS, EOS and what the chat template writes are looked at. A padding token may lie beyond: it is never fed.
    """
    if tokenizer is None or len(tokenizer) <= vocab_size:
        return
    written = str(getattr(tokenizer, "chat_template", None) or "")
    ends = (getattr(tokenizer, "bos_token", None), getattr(tokenizer, "eos_token", None))
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: int(item[1])):
        if number >= vocab_size and (token in ends or token in written):
            raise UserError(without_row(token, number, vocab_size))


def without_row(token: str, number: int, vocab_size: int) -> str:
    """The line about a token without a row in the embedding."""
    return (
        f"the tokenizer's token {token!r} has id {number} and the model's embedding {vocab_size} rows: give a "
        "checkpoint whose embedding was resized with its tokenizer"
    )
