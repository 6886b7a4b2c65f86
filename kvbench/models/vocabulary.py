"""Whether a tokenizer and a model's embedding belong together. This imports neither torch nor transformers."""

from __future__ import annotations

from typing import Any

from kvbench.errors import UserError


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Raise UserError for a tokenizer with tokens that the model's embedding has no rows for.

    A padding token may be one of them: it is never fed.
    """
    if tokenizer is None or len(tokenizer) <= vocab_size:
        return
    beyond = sorted((id, token) for token, id in tokenizer.get_vocab().items() if id >= vocab_size)
    fed = [(id, token) for id, token in beyond if token != tokenizer.pad_token or id == tokenizer.eos_token_id]
    if fed:
        raise UserError(
            f"the tokenizer has {len(fed)} tokens beyond the model's {vocab_size} embedding rows, as {fed[0][1]!r} "
            f"with id {fed[0][0]}: give a checkpoint whose embedding was resized with its tokenizer"
        )
