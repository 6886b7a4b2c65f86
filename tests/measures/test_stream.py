"""Stream: answers and texts against the model without any cache; loops by hand; what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvbench.cache.build import Method
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.measures.context import RunContext
from kvbench.measures.stream import Stream
from kvbench.measures.stream.free import generate_freely, same_tokens
from kvbench.measures.stream.loops import loop_start
from kvbench.measures.stream.working_out import write_and_ask
from kvbench.methods.fp8 import Fp8
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.recompute import Recompute
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.load import end_tokens
from kvbench.results.row import flags_of
from kvbench.texts.stream_tasks import TASKS, write
from kvbench.texts.word_lists import ADJECTIVES, FIRST_NAMES, NOUNS
from tests.shared.models import random_llama
from tests.shared.text import loaded, methods, run_context_of, value

PIECES = r"\n| ?\w+| ?[^\w\s]"
"""A word or a mark with the space before it, or a newline."""
SAID = """+ =
Total of
All marbles are counted
The list once more
From go to
Step to"""
NAMED = (*NOUNS, *ADJECTIVES, *FIRST_NAMES, *".,:+=", *map(str, range(200)))
WORDS = (
    *(f"{space}{word}" for space in ("", " ") for word in NAMED),
    *(piece for text in (SAID, *(made.opening for made in TASKS.values())) for piece in re.findall(PIECES, text)),
)
LENGTH = 192


def tokenizer_of(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each of the words; what is not among them becomes `#`."""
    vocabulary = {word: i for i, word in enumerate(["#", *sorted(set(words))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="#", clean_up_tokenization_spaces=False)


TOKENIZER = tokenizer_of(WORDS)
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)


def bench(named: dict[str, Method]) -> RunContext:
    text = torch.randint(len(TOKENIZER), (2000,), generator=torch.Generator().manual_seed(0))
    return run_context_of(MODEL, named, text, TOKENIZER)


def stream(**changes: Any) -> Stream:
    return replace(Stream(lengths=[LENGTH], samples=3, batch=2, prompt=40), **changes)


@pytest.mark.parametrize(("task", "samples"), [("running_sum", 1), ("list_copy", 3), ("state_machine", 1)])
def test_the_full_cache_answers_as_the_model_without_a_cache(task: str, samples: int) -> None:
    """Three samples are a batch of two, padded at the end, and one more."""
    result = write_and_ask(bench(methods("full")), stream(samples=samples), task, LENGTH)
    shares, nll, tokens = [], 0.0, 0
    for i, sample in enumerate(result.samples):
        written = write(TOKENIZER, task, LENGTH, 0, i)
        ids = torch.tensor([written.ids])
        logits = MODEL(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        right = [bool((logits[a - 1 : b - 1].argmax(-1) == ids[0, a:b]).all()) for a, b in written.answers]
        assert sample["methods"][0]["right"] == right
        shares.append(sum(right) / len(right))
        nll -= sum(float(logits[t - 1, ids[0, t]]) for a, b in written.answers for t in range(a, b))
        tokens += sum(b - a for a, b in written.answers)
    assert value(result.rows, "full", "answer_rate") == pytest.approx(sum(shares) / samples)
    assert value(result.rows, "full", "answer_nll") == pytest.approx(nll / tokens, rel=1e-4)
    assert value(result.rows, "full", "engaged") == 0
    assert {row.dataset for row in result.rows} == {"synthetic"}


def test_methods_evict_while_the_text_is_written() -> None:
    result = write_and_ask(
        bench(methods("full", "h2o", "streaming_llm", budget=24)), stream(samples=1), "list_copy", 100
    )
    for name in ("h2o", "streaming_llm"):
        assert value(result.rows, name, "kept_tokens") == 24
        assert value(result.rows, name, "engaged") == 1
        assert value(result.rows, name, "answer_nll") != value(result.rows, "full", "answer_nll")


def test_a_budget_for_every_token_answers_as_the_full_cache() -> None:
    result = write_and_ask(bench(methods("full", "h2o", budget=2000)), stream(samples=1), "running_sum", 120)
    nll = [value(result.rows, name, "answer_nll") for name in ("full", "h2o")]
    assert nll[1] == pytest.approx(nll[0], rel=1e-5)
    assert value(result.rows, "h2o", "answer_rate_minus_full") == 0


def test_answers_that_the_full_cache_has_none_of_say_nothing() -> None:
    """Random weights answer nothing right, and the rows say so."""
    result = write_and_ask(bench(methods("full", "h2o")), stream(samples=1), "state_machine", LENGTH)
    assert all("uninformative" in flags_of(row) for row in result.rows if row.metric == "answer_rate")


def greedy(ids: torch.Tensor, count: int) -> list[int]:
    """Tokens by argmax, the whole text through the model for each."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(MODEL(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([found[-1:]])], dim=1)
    return found


def cut(tokens: list[int]) -> list[int]:
    """Up to and with the first end token of `MODEL`."""
    ends = end_tokens(loaded(MODEL, TOKENIZER))
    return tokens[: next((t + 1 for t, token in enumerate(tokens) if token in ends), len(tokens))]


def test_free_generation_of_the_full_cache_is_plain_greedy_generation() -> None:
    here = bench(methods("full", "h2o", budget=12))
    result = generate_freely(here, stream(samples=2), 80)
    for sample in result.samples:
        full, other = (one["tokens"] for one in sample["methods"])
        assert full == cut(greedy(here.window(sample["offset"], 40)[None], 80))
        assert [one["loop_start"] for one in sample["methods"]] == [loop_start(full), loop_start(other)]
    pairs = [[one["tokens"] for one in sample["methods"]] for sample in result.samples]
    same = [next((t for t in range(min(len(a), len(b))) if a[t] != b[t]), min(len(a), len(b))) for a, b in pairs]
    assert value(result.rows, "h2o", "divergence_step") == sum(same) / 2
    assert value(result.rows, "full", "divergence_step") == sum(len(a) for a, _ in pairs) / 2
    looping = sum(loop_start(a) is not None for a, _ in pairs)
    assert value(result.rows, "full", "loop_share") == looping / 2
    assert value(result.rows, "full", "generated_tokens") == sum(len(a) for a, _ in pairs) / 2


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([7] * 24, 0),
        ([7] * 23, None),  # fewer than 24 tokens
        ([1, 2, 3, *[7] * 30], 3),
        ([*range(100), *[4, 5] * 12], 100),
        ([*range(100), *[4, 5] * 12, 4], 100),  # the last repetition is cut off
        ([*range(100), *[4, 5] * 12, 9], None),  # the text has left its loop
        ([*range(20)] * 3, 0),
        ([*range(20)] * 2 + [*range(19)], None),  # not three times
        ([*range(64)] * 3, 0),
        ([*range(65)] * 4, None),  # the block is too long
        (list(range(200)), None),
        ([], None),
        ([1], None),
    ],
)
def test_what_counts_as_a_loop(tokens: list[int], start: int | None) -> None:
    assert loop_start(tokens) == start


@pytest.mark.parametrize(
    ("mine", "full", "same"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([9], [1], 0), ([], [1], 0)],
)
def test_tokens_before_the_first_difference(mine: list[int], full: list[int], same: int) -> None:
    assert same_tokens(mine, full) == same


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Method("recompute", Recompute(), DenseStore()), "runs the whole prefix"),
        (Method("h2o", H2O(budget=0.2), DenseStore()), "type budget=256"),
        (Method("snapkv", SnapKV(budget=64), DenseStore()), "type decode=evict"),
        (Method("full", Full(), Fp8()), "takes its scale from the prompt"),
    ],
)
def test_methods_that_cannot_evict_while_writing_are_refused(method: Method, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Stream().refuse(method)


@pytest.mark.parametrize("rule", [H2O(budget=64), SnapKV(budget=64, decode="evict"), StreamingLLM(budget=64), Full()])
def test_methods_that_hold_their_budget_are_not_refused(rule: Any) -> None:
    Stream().refuse(Method("m", rule, DenseStore()))


def test_cells_are_one_length_and_task_each() -> None:
    cells = Stream(lengths=[256, 512], tasks=["list_copy", "free"]).cells()
    assert [(cell.lengths, cell.task) for cell in cells] == [
        ([256], "list_copy"),
        ([256], "free"),
        ([512], "list_copy"),
        ([512], "free"),
    ]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("sample", range(4))
def test_samples_are_as_long_as_asked_and_hold_their_answers(task: str, sample: int) -> None:
    written = write(TOKENIZER, task, LENGTH, 5, sample)
    text = TOKENIZER.decode(written.ids[: written.prompt + LENGTH])
    asked = TOKENIZER.decode(written.ids[written.prompt + LENGTH :])
    assert written == write(TOKENIZER, task, LENGTH, 5, sample)
    assert written.ids != write(TOKENIZER, task, LENGTH, 6, sample).ids
    assert written.answers[0][0] > written.prompt + LENGTH - 1
    answers = [TOKENIZER.decode(written.ids[a:b]).strip() for a, b in written.answers]
    if task == "running_sum":
        totals = dict(re.findall(r"Total of (\w+): (\d+)", text))
        assert dict(re.findall(r"Total of (\w+): (\d+)", asked)) == totals
        assert len(totals) == len(answers) == 6
        lines = [(name, *map(int, numbers)) for name, *numbers in re.findall(r"(\w+): (\d+) \+ (\d) = (\d+)", text)]
        assert all(before + more == after for _, before, more, after in lines)
        assert {name: str(after) for name, _, _, after in lines} == totals  # each one's last sum
    elif task == "list_copy":
        assert answers == re.findall(r"\d+\. (\w+)", text)[:16]
    else:
        table = dict(re.findall(r"From (\w+) go to (\w+)\.", text))
        walk = re.findall(r": (\w+) to (\w+)\.", text)
        assert len(table) == 16 and all(table[here] == there for here, there in walk)
        pairs = re.findall(r"From (\w+) go to (\w+)", asked)
        assert len(pairs) == len(answers) == 8 and all(table[place] == there for place, there in pairs)
        assert not {place for place, _ in pairs} & {place for place, _ in walk}  # the table alone has the answers


def test_a_length_that_holds_too_few_lines_is_refused() -> None:
    with pytest.raises(UserError, match=r"too short for state_machine.*type stream\.lengths=\[160\]"):
        write(TOKENIZER, "state_machine", 80, 0, 0)
