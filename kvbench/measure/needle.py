"""Needle retrieval: a five-digit number hidden in a long text, asked for after the text has been compressed.

The prompt is a completion, so that base models can answer: "... The special magic number for amber is:". Lengths are
exact tokens of context, needle included, question not. A hit is the value itself, standing alone in the answer.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.record import PrefillRecord
from kvbench.decode import generate
from kvbench.errors import UserError
from kvbench.measure.bench import Bench, Entry, Finding
from kvbench.measure.perplexity import token_hash
from kvbench.measure.statistics import wilson
from kvbench.rows import Row
from kvbench.settings import Needle

WORDS = ("amber", "anchor", "basket", "beacon", "candle", "canyon", "cobalt", "copper", "ember", "falcon", "garden",
         "harbor", "island", "jasper", "lantern", "meadow", "orchid", "pepper", "quartz", "raven", "saddle", "silver",
         "timber", "valley", "walnut", "willow", "winter", "yellow", "zenith", "marble")  # fmt: skip
NEEDLE = "\nThe special magic number for {word} is: {value}.\n"
QUESTION = "\nThe special magic number for {word} is:"
ANSWER_TOKENS = 12
"""Enough for a space, five digits one token each, and what shows that the number ended there."""


@dataclass(frozen=True)
class Prompt:
    """ids: context tokens, exactly `length` of them. question: the tokens that follow. value: what must come back."""

    length: int
    depth: float
    sample: int
    ids: list[int]
    question: list[int]
    word: str
    value: str


@dataclass(frozen=True)
class Answer:
    """What a method answered to a prompt."""

    text: str
    hit: bool
    engaged: bool
    kept: float


def needle(bench: Bench, settings: Needle) -> Iterator[Finding]:
    """One finding a length: rows hits, hit_rate, engaged, kept_tokens a method and depth, and one over all depths."""
    for length in settings.lengths:
        prompts = make_prompts(bench.loaded.tokenizer, bench.tokens, bench.seed, settings, length)
        answers: dict[str, dict[int, Answer]] = {entry.label: {} for entry in bench.entries}
        with bench.progress.phase(f"needle {length}", len(prompts) * len(bench.entries)) as advance:
            for batch in _batches(prompts, settings.batch):
                _ask(bench, settings, length, [prompts[i] for i in batch], batch, answers)
                advance(len(batch) * len(bench.entries))
        done = bench.alive("needle", context=length)
        rows = [row for entry in done for row in _rows(bench, entry, settings, length, prompts, answers)]
        yield Finding(rows, _samples(bench, done, prompts, answers, settings))


def check_prompts(tokenizer: Any, tokens: Tensor, seed: int, settings: Needle, max_positions: int | None) -> None:
    """Raise UserError, before anything runs, for a prompt that cannot be made or does not fit the model's positions."""
    for length in settings.lengths:
        prompts = make_prompts(tokenizer, tokens, seed, settings, length)
        needed = length + max(len(prompt.question) for prompt in prompts) + ANSWER_TOKENS
        if max_positions is not None and needed > max_positions:
            raise UserError(
                f"needle.lengths={length} needs {needed} positions with question and answer, and the model has "
                f"{max_positions}; type needle.lengths={length - needed + max_positions} or less"
            )


def make_prompts(tokenizer: Any, tokens: Tensor, seed: int, settings: Needle, length: int) -> list[Prompt]:
    """All prompts of a length, depth by depth."""
    return [
        make_prompt(tokenizer, tokens, seed, length, depth, sample)
        for depth in settings.depths for sample in range(settings.samples)
    ]  # fmt: skip


def make_prompt(tokenizer: Any, tokens: Tensor, seed: int, length: int, depth: float, sample: int) -> Prompt:
    """The prompt of one cell, the same for every method: word, value and stretch of text drawn from the seed.

    Raises UserError where the text or the length is too short, or where the needle does not survive.
    """
    draw = random.Random(f"{seed}/{length}/{depth}/{sample}")
    word, value = draw.choice(WORDS), str(draw.randrange(10_000, 100_000))
    pin = _encode(tokenizer, NEEDLE.format(word=word, value=value))
    question = _encode(tokenizer, QUESTION.format(word=word))
    room = length - len(pin)
    if room < 1:
        raise UserError(f"needle.lengths={length} has no room for the needle; type {2 * len(pin)} or more")
    if room > len(tokens):
        raise UserError(f"needle.lengths={length} needs {room} tokens of text and there are {len(tokens)}; type less")
    start = draw.randrange(0, len(tokens) - room + 1)
    hay = tokens[start : start + room].tolist()
    at = round(depth * room)
    ids = hay[:at] + pin + hay[at:]
    text = tokenizer.decode(ids)
    if f"number for {word} is: {value}" not in text or len(ids) != length:
        raise UserError(
            f"this tokenizer breaks the needle ('{' '.join(tokenizer.decode(pin).split())}' came back); "
            f"leave needle out: measure='[perplexity,memory,latency]'"
        )
    return Prompt(length, depth, sample, ids, question, word, value)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _batches(prompts: list[Prompt], size: int) -> Iterator[list[int]]:
    """Indices of prompts that can run together: questions of one length in tokens."""
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.question), []).append(i)
    for indices in by_length.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _ask(bench: Bench, settings: Needle, length: int, prompts: list[Prompt], indices: list[int],
         answers: dict[str, dict[int, Answer]]) -> None:  # fmt: skip
    device, model = bench.loaded.device, bench.loaded.model
    context = torch.tensor([prompt.ids for prompt in prompts], device=device)
    question = torch.tensor([prompt.question for prompt in prompts], device=device)
    if settings.question == "before":
        context = torch.cat([context, question], dim=1)
    entries = bench.alive("needle", context=length)
    record: PrefillRecord | None = None
    with bench.shared(entries, "needle", context=length):
        record = prefill(model, context, [entry.method.rule for entry in entries])
    for entry in entries if record is not None else []:
        with bench.cell(entry, "needle", context=length):
            texts, engaged, kept = _answer(bench, entry, record, question if settings.question == "after" else None)
            for i, prompt, text in zip(indices, prompts, texts, strict=True):
                answers[entry.label][i] = Answer(text, is_hit(text, prompt.value), engaged, kept)


def _answer(
    bench: Bench, entry: Entry, record: PrefillRecord, question: Tensor | None
) -> tuple[list[str], bool, float]:
    """The answers, whether the cache had been compressed before they began, and tokens kept at their end."""
    fed = 0 if question is None else question.shape[1]
    cache = build_cache(bench.loaded.model, entry.method, record, max_new_tokens=fed + ANSWER_TOKENS,
                        max_step=max(1, fed), kernel=bench.kernel)  # fmt: skip
    engaged = cache.has_compressed
    tokens = generate(bench.loaded.model, question, cache, ANSWER_TOKENS)
    texts = [bench.loaded.tokenizer.decode(row) for row in tokens.tolist()]
    return texts, engaged, cache.kept_tokens


def is_hit(answer: str, value: str) -> bool:
    """Whether the first number in the answer is the value: wording, or digits inside another number, do not count."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and numbers[0] == value


def _rows(bench: Bench, entry: Entry, settings: Needle, length: int, prompts: list[Prompt],
          answers: dict[str, dict[int, Answer]]) -> list[Row]:  # fmt: skip
    base = replace(entry.row, measure="needle", question=settings.question, context=length,
                   protocol="single_number", batch=min(settings.batch, len(prompts)))  # fmt: skip
    mine, full = answers[entry.label], answers[bench.baseline.label]
    rows: list[Row] = []
    groups: list[tuple[float | None, list[int]]] = [
        (depth, [i for i, prompt in enumerate(prompts) if prompt.depth == depth]) for depth in settings.depths
    ]
    for depth, cell in [*groups, (None, list(range(len(prompts))))]:
        hits, n = sum(mine[i].hit for i in cell), len(cell)
        blind = all(i in full for i in cell) and not any(full[i].hit for i in cell)
        note = "uninformative: the full cache finds none of these" if blind else None
        low, high = wilson(hits, n)
        here = replace(base, depth=depth, n=n, note=note)
        rows.append(replace(here, metric="hit_rate", value=hits / n, unit="share", low=low, high=high))
        rows.append(replace(here, metric="hits", value=float(hits), unit="hits"))
    for metric, unit, values in (
        ("engaged", "share", [float(answer.engaged) for answer in mine.values()]),
        ("kept_tokens", "tokens", [answer.kept for answer in mine.values()]),
    ):
        rows.append(replace(base, metric=metric, unit=unit, value=sum(values) / len(values), n=len(values)))
    return rows


def _samples(bench: Bench, entries: list[Entry], prompts: list[Prompt], answers: dict[str, dict[int, Answer]],
             settings: Needle) -> list[dict[str, Any]]:  # fmt: skip
    samples = []
    for i, prompt in enumerate(prompts):
        text = bench.loaded.tokenizer.decode(prompt.ids + prompt.question)
        sample: dict[str, Any] = {
            "measure": "needle", "length": prompt.length, "depth": prompt.depth, "sample": prompt.sample,
            "question": settings.question, "word": prompt.word, "value": prompt.value,
            "sha256": token_hash(prompt.ids + prompt.question),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "methods": [
                {"method": entry.row.method, "store": entry.row.store, "knobs": entry.knobs,
                 "answer": answers[entry.label][i].text, "hit": answers[entry.label][i].hit}
                for entry in entries
            ],
        }  # fmt: skip
        if bench.save_tokens:
            sample["ids"], sample["question_ids"] = prompt.ids, prompt.question
        samples.append(sample)
    return samples
