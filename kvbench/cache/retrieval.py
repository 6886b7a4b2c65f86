"""Retrieval heads: which KV heads carry a passkey from far back in the prompt to the model's answer.

Eight prompts of up to 512 tokens are run once. Each holds a random passkey after an introducing sentence, in text of
the essays, and ends with the same sentence and the passkey again. A head's number is the attention that the queries
which predict the second passkey give to the first one. For a model without a tokenizer all tokens are random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.prefill import prefill
from kvbench.cache.rule import KeepRule
from kvbench.files import write_atomic

KEY, INTRODUCTION = 16, "\n\nThe passkey to the vault is this list of words:"
"""Tokens of a passkey, and the words before it."""

WORDS = """
apple river stone cloud tiger piano window candle forest bridge mirror basket engine garden pencil rocket saddle temple
valley wagon butter copper dragon feather hammer island jacket kettle lantern marble needle orange
"""


@dataclass(frozen=True)
class Answering(KeepRule):
    """Keeps all tokens, and asks a prefill for what the queries at the end of the prompt attend to."""

    queries: int = KEY
    needs_budget = False

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(self.queries),)


@dataclass(frozen=True)
class Passkeys:
    """Prompts ids, int64 [B, T], that end with their passkey of `length` tokens; start: where it also stands before."""

    ids: Tensor
    start: list[int]
    length: int


def passkey_prompts(filler: Tensor, tokenizer: Any, vocab_size: int) -> Passkeys:
    """A prompt from each row of filler, int64 [B, T], and as long; passkeys at evenly spaced depths."""
    draw = random.Random(0)
    length = min(KEY, filler.shape[1] // 8)
    rows, starts = [], []
    introduction = _ids(tokenizer, INTRODUCTION) or [draw.randrange(vocab_size) for _ in range(length)]
    introduction = introduction[-length:]
    for i, row in enumerate(filler.tolist()):
        words = "".join(f" {draw.choice(WORDS.split())}" for _ in range(length))
        key = (_ids(tokenizer, words) or [draw.randrange(vocab_size) for _ in range(length)])[:length]
        text = row[: len(row) - 2 * (len(introduction) + length)]
        at = len(text) * i // len(filler)
        rows.append([*text[:at], *introduction, *key, *text[at:], *introduction, *key])
        starts.append(at + len(introduction))
    return Passkeys(torch.tensor(rows), starts, length)


def _ids(tokenizer: Any, words: str) -> list[int]:
    return [] if tokenizer is None else list(tokenizer(words, add_special_tokens=False).input_ids)


def retrieval_by_head(model: PreTrainedModel, prompts: Passkeys) -> dict[int, Tensor]:
    """Attention mass from a passkey's queries to its first mention, float32 [Hkv] for each layer without a window.

    The mean over prompts and queries of the sum over the query heads of a KV head.
    """
    rule = Answering(queries=prompts.length + 1)  # the last token of the passkey predicts nothing of it
    sums: dict[int, list[Tensor]] = {}
    for ids, start in _each(prompts):
        for layer in prefill(model, ids, [rule]).layers:
            if layer.scoring.window is None:
                seen = layer.observed[LastQueries(rule.queries)][0, ..., :-1, start : start + prompts.length]
                sums.setdefault(layer.index, []).append(seen.sum((1, 3)).mean(-1).cpu())
    return {index: torch.stack(found).mean(0) for index, found in sums.items()}


def _each(prompts: Passkeys) -> Iterator[tuple[Tensor, int]]:
    for i, start in enumerate(prompts.start):
        yield prompts.ids[i : i + 1], start


def save_retrieval(path: Path, found: dict[int, Tensor]) -> None:
    """Write a number for each head to a safetensors file, the whole file or nothing."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save({str(index): numbers.contiguous() for index, numbers in found.items()}))


def load_retrieval(path: Path) -> dict[int, Tensor] | None:
    """What `save_retrieval` wrote; None where there is no such file or it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {int(name): numbers for name, numbers in load_file(path).items()}
    except (OSError, SafetensorError):
        return None
