"""From texts to token ids, and which of a run's tokens belong to which text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError
from kvbench.models.vocabulary import check_vocabulary, without_row
from kvbench.texts.load import Text

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stretch:
    """The tokens of one text among those of a run: from `start` up to `stop`."""

    name: str
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def tokenize(text: Text, tokenizer: Any = None, vocab_size: int | None = None) -> torch.Tensor:
    """The whole text as one LongTensor [T], without special tokens; several texts one behind the other.

    The last few results are kept in memory. Random tokens need `vocab_size` and no tokenizer. Raises UserError where a
    real text meets no tokenizer, or one with tokens beyond `vocab_size`.
    """
    import torch

    ids = [_token_ids(each, tokenizer, vocab_size) for each in text.each]
    return ids[0] if len(ids) == 1 else torch.cat(ids)


def stretches(text: Text, tokenizer: Any = None, vocab_size: int | None = None) -> tuple[Stretch, ...]:
    """Where each text lies among the tokens of `tokenize`."""
    found: list[Stretch] = []
    for each in text.each:
        start = found[-1].stop if found else 0
        found.append(Stretch(each.name, start, start + len(_token_ids(each, tokenizer, vocab_size))))
    return tuple(found)


def spread(lengths: Sequence[int], count: int, longest: int) -> list[int]:
    """First token of each of `count` samples of `longest` tokens, counted over texts of these lengths in a row.

    Every text has an equal share, the first ones one more where it does not divide. Samples are evenly spread over
    their text, lie inside it, and do not overlap where the text is long enough.
    """
    found, begin = list[int](), 0
    for i, length in enumerate(lengths):
        share = count // len(lengths) + (i < count % len(lengths))
        stride = (length - longest) / max(1, share - 1)
        found += [begin + int(k * stride) for k in range(share)]
        begin += length
    return found


def bos_tokens(rule: str, tokenizer: Any = None) -> tuple[int, ...]:
    """The tokens that every window and prompt begins with; empty for none.

    rule: first, none, or auto: what the model's own tokenizer puts before a text. Gemma and Llama 3 begin with BOS
    (without it Gemma's perplexity is ruined), Qwen and SmolLM2 with nothing, GLM with two tokens, [gMASK]<sop>. Raises
    UserError for first without a BOS token.
    """
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    if rule == "none" or (tokenizer is None and rule != "first"):
        return ()
    if rule == "auto":
        return tuple(text_prefix(tokenizer))
    if bos is None:
        raise UserError("data.bos=first, and this model's tokenizer has no BOS token; type data.bos=none")
    return (bos,)


def text_prefix(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    plain, whole = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (False, True))
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def token_hash(ids: list[int]) -> str:
    """sha256 of token ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


@lru_cache(maxsize=8)
def _token_ids(text: Text, tokenizer: Any, vocab_size: int | None) -> torch.Tensor:
    import torch

    if text.random_tokens:
        if vocab_size is None:
            raise ValueError("random tokens need the model's vocab_size")
        generator = torch.Generator().manual_seed(text.seed)
        return torch.randint(vocab_size, (text.random_tokens,), generator=generator)
    if tokenizer is None:
        raise UserError(f"data={text.name} needs a tokenizer and this model has none: write data=random")
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    # verbose=False: a text longer than the model is what we want, so no warning about its length.
    encoded = tokenizer(text.text, add_special_tokens=False, verbose=False)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.long)
    largest = int(ids.max()) if len(ids) else 0
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(without_row(str(tokenizer.convert_ids_to_tokens(largest)), largest, vocab_size))
    return ids
