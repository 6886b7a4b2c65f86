"""Needle: prompts that hold what they should, hits that count the value alone, and compression before the question."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.measure import needle as measured
from kvbench.measure.bench import Bench
from kvbench.measure.haystack import TASKS, Words, is_hit, needle as needle_sentence, recall
from kvbench.measure.needle import needle
from kvbench.measure.prompts import ANSWER_TOKENS, Maker, Prompt, check_prompts, make_prompts, template_of
from kvbench.measure.statistics import wilson
from kvbench.model import LoadedModel
from kvbench.settings import Needle
from tests.models import random_llama
from tests.text import CHARACTERS, Breaks, bench_of, character_tokenizer, light, methods, prose, rows_of, value

TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(3_000))["input_ids"])
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)
LENGTH = 120


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with light():
        yield


def settings(**changes: Any) -> Needle:
    plain = Needle(lengths=[LENGTH], depths=[0.0, 0.5, 1.0], samples=2, question=["after"], batch=4)
    return dataclasses.replace(plain, **changes)


def one(seed: int, length: int, depth: float, sample: int) -> Prompt:
    maker = Maker(TOKENIZER, TEXT, seed, settings(), length)
    return maker.prompt(TASKS["single_number"], depth, sample)


def bench(named: dict[str, Method], **more: Any) -> Bench:
    return bench_of(MODEL, named, TEXT, TOKENIZER, **more)


@dataclass(frozen=True)
class Spy(KeepRule):
    """Keeps the newest tokens, and notes the newest position whenever it is asked."""

    asked: list[int] = field(default_factory=list)

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        self.asked.append(newest)
        return position.to(torch.float64)


# prompts


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", [70, 120, 500])
def test_the_needle_is_whole_and_where_it_should_be(length: int, depth: float) -> None:
    for sample in range(5):
        prompt = one(0, length, depth, sample)
        (pin,), (value,) = prompt.draft.needles, prompt.draft.references
        text = TOKENIZER.decode(prompt.ids)
        assert len(prompt.ids) == length
        assert text.count(pin) == 1
        assert text.index(pin) == round(depth * (length - len(pin)))
        before, after = text.split(pin)
        assert before + after in TOKENIZER.decode(TEXT)  # one stretch of the text, cut open for the needle
        assert len(value) == 5 and value.isdigit()
        assert TOKENIZER.decode(prompt.question) + f" {value}.\n" == pin


@pytest.mark.slow
@pytest.mark.parametrize("length", [256, 2048])
def test_the_needle_survives_a_real_tokenizer(smollm2: LoadedModel, essays_folder: Any, length: int) -> None:
    text = "".join(file.read_text() for file in sorted(essays_folder.glob("*.txt"))[:8])
    tokens = torch.tensor(smollm2.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    for prompt in make_prompts(smollm2.tokenizer, tokens, 0, settings(samples=20), length):
        assert len(prompt.ids) == length
        assert all(pin.strip() in smollm2.tokenizer.decode(prompt.ids) for pin in prompt.draft.needles)
        assert not set(prompt.ids) & set(smollm2.tokenizer.all_special_ids)


def test_prompts_differ_by_sample_depth_and_seed_and_by_nothing_else() -> None:
    def prompt(seed: int = 0, depth: float = 0.5, sample: int = 0) -> Prompt:
        return one(seed, LENGTH, depth, sample)

    assert prompt() == prompt()
    drawn = [prompt(*where) for where in [(0, 0.5, 0), (1, 0.5, 0), (0, 0.1, 0), (0, 0.5, 1)]]
    assert len({each.draft.references[0] for each in drawn}) == len({tuple(each.ids) for each in drawn}) == 4


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lengths": [40]}, "no room for the needle"),
        ({"lengths": [LENGTH, 4_000]}, "needle.lengths=4000"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_prompts(TOKENIZER, TEXT, 0, settings(**changes), None)


def test_question_and_answer_count_as_positions() -> None:
    longest = max(len(p.question) for p in make_prompts(TOKENIZER, TEXT, 0, settings(), LENGTH))
    check_prompts(TOKENIZER, TEXT, 0, settings(), LENGTH + longest + ANSWER_TOKENS)
    with pytest.raises(UserError, match=f"type needle.lengths={LENGTH - 1} or less"):
        check_prompts(TOKENIZER, TEXT, 0, settings(), LENGTH + longest + ANSWER_TOKENS - 1)


def test_a_tokenizer_that_breaks_the_needle_is_refused() -> None:
    without_sevens = character_tokenizer(CHARACTERS.replace("7", ""))
    with pytest.raises(UserError, match="breaks the needle"):
        check_prompts(without_sevens, TEXT, 0, settings(samples=20), None)


# hits


@pytest.mark.parametrize(
    ("answer", "hit"),
    [
        (" 48213.", True),
        ("48213", True),
        (": 48213\nThe special magic number", True),
        (" 48213, not 11111", True),
        (" 48213 48213", True),
        (" -48213!", True),
        ("", False),
        (" The special magic number for amber is", False),
        (" 11111, or 48213", False),
        (" 148213", False),
        (" 482135", False),
        (" 4821", False),
        (" 4 8 2 1 3", False),
        (" 48,213", False),
        (" 0.48213", False),
        (" four eight two one three", False),
    ],
)
def test_a_hit_is_the_value_as_the_first_number(answer: str, hit: bool) -> None:
    assert is_hit(answer, "48213") is hit


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (0, 4), (3, 4), (4, 4), (7, 12), (120, 200)])
def test_wilson(hits: int, n: int) -> None:
    expected = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


# the measure


def test_rows_and_samples_agree() -> None:
    (finding,) = needle(bench(methods("full", "h2o", "kivi"), save_tokens=True), settings())
    assert len(finding.samples) == 6
    for sample in finding.samples:
        ids, question = sample["ids"], sample["question_ids"]
        assert len(ids) == sample["length"] == LENGTH
        assert sample["sha256"] == hashlib.sha256(",".join(map(str, ids + question)).encode()).hexdigest()
        text = TOKENIZER.decode(ids + question)
        assert sample["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert f" is: {sample['references'][0]}." in text
        assert [method["method"] for method in sample["methods"]] == ["full", "h2o", "kivi"]
        assert all(method["hit"] == is_hit(method["answer"], sample["references"][0]) for method in sample["methods"])
        assert all(len(method["answer"]) == ANSWER_TOKENS for method in sample["methods"])  # a token is a character
    for depth, n in [(0.0, 2), (0.5, 2), (1.0, 2), (None, 6)]:
        (row,) = (r for r in finding.rows if r.method == "h2o" and r.metric == "hit_rate" and r.depth == depth)
        assert (row.n, row.context, row.question, row.batch) == (n, LENGTH, "after", 4)
        assert (row.low, row.high) == wilson(0, n)
    assert value(finding.rows, "h2o", "engaged") == 1
    assert value(finding.rows, "h2o", "kept_tokens") == 12
    assert value(finding.rows, "full", "engaged") == 0


def test_answers_do_not_depend_on_batches_or_on_other_methods() -> None:
    def answers(*names: str, batch: int) -> dict[tuple[str, str], str]:
        (finding,) = needle(bench(methods(*names)), settings(samples=3, batch=batch))
        return {
            (sample["sha256"], method["method"]): method["answer"]
            for sample in finding.samples for method in sample["methods"]
        }  # fmt: skip

    together = answers("full", "h2o", "kivi", "random", batch=4)
    assert len(together) == 9 * 4
    assert answers("full", "random", "kivi", "h2o", batch=1) == together
    alone = answers("full", "kivi", batch=3)
    assert alone == {key: answer for key, answer in together.items() if key[1] in ("full", "kivi")}


@pytest.mark.parametrize("question", ["after", "before"])
def test_what_is_compressed_ends_before_or_after_the_question(question: str) -> None:
    rule = Spy(12)
    asked = settings(depths=[0.5], samples=1, question=[question])
    rows = rows_of(needle(bench(methods("full") | {"spy": Method("spy", rule, DenseStore())}), asked))
    (prompt,) = make_prompts(TOKENIZER, TEXT, 0, asked, LENGTH)
    compressed = LENGTH + (len(prompt.question) if question == "before" else 0)
    assert rule.asked[0] == compressed - 1
    fed = len(prompt.question) + ANSWER_TOKENS - 1  # the last token of the answer is not fed
    assert rule.asked[-1] == LENGTH + fed - 1
    # A question that comes afterwards is one step, not one a token.
    layers = 2
    assert len(rule.asked) == layers * (1 + ANSWER_TOKENS - 1 + (question == "after"))
    assert {row.question for row in rows} == {question}


def test_full_that_finds_nothing_makes_a_cell_uninformative(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(model: object, question: object, cache: Any, count: int) -> Tensor:
        found = cache.kept_tokens == 12 or cache.last_logits[0, 0] > threshold
        return torch.full((cache.last_logits.shape[0], count), TOKENIZER.convert_tokens_to_ids("1" if found else "x"))

    monkeypatch.setattr(measured, "generate", answer)
    monkeypatch.setattr(measured, "is_hit", lambda text, value: text[0] == "1")
    threshold = torch.inf  # the full cache finds nothing
    rows = rows_of(needle(bench(methods("full", "h2o")), settings(batch=1)))
    assert value(rows, "full", "hit_rate", depth=None) == 0
    assert value(rows, "h2o", "hit_rate", depth=None) == 1
    rates = [row for row in rows if row.metric == "hit_rate"]
    assert all(row.note is not None and row.note.startswith("uninformative") for row in rates)
    threshold = -torch.inf  # the full cache finds all
    rows = rows_of(needle(bench(methods("full", "h2o")), settings(batch=1)))
    assert value(rows, "full", "hits", depth=None) == 6
    assert all(row.note is None for row in rows)


@pytest.mark.slow
def test_a_real_model_finds_the_needle_with_a_full_cache_and_not_without_it(
    smollm2: LoadedModel, essays_folder: Any
) -> None:
    text = "".join(file.read_text() for file in sorted(essays_folder.glob("*.txt"))[:8])
    tokens = torch.tensor(smollm2.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    asked = settings(lengths=[512], depths=[0.2, 0.6], samples=2)
    rows = rows_of(
        needle(bench_of(smollm2.model, methods("full", "random", budget=32), tokens, smollm2.tokenizer), asked)
    )
    assert value(rows, "full", "hit_rate", depth=None) == 1
    assert value(rows, "random", "hit_rate", depth=None) < 0.5


# failures


@pytest.mark.parametrize("how", ["failed", "oom"])
def test_one_broken_method_leaves_the_others_whole(how: str) -> None:
    asked = settings(lengths=[LENGTH, 90])
    clean = rows_of(needle(bench(methods("full", "h2o")), asked))
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=LENGTH - 1), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(needle(here, asked))
    assert [row for row in rows if row.method != "breaks"] == clean
    assert {row.context for row in rows if row.method == "breaks"} == {90}
    ((label, row),) = here.failures
    assert (label, row.measure, row.context, row.status) == ("breaks", "needle", LENGTH, how)


def _first_question(seed: int) -> int:
    return len(make_prompts(TOKENIZER, TEXT, seed, settings(samples=4), LENGTH)[0].question)


def _longest_question(seed: int) -> int:
    return max(len(prompt.question) for prompt in make_prompts(TOKENIZER, TEXT, seed, settings(samples=4), LENGTH))


def test_a_baseline_that_broke_half_way_calls_nothing_uninformative() -> None:
    # It breaks after some answers have been written down: at a position that only longer questions reach.
    seed = next(s for s in range(100) if _first_question(s) < _longest_question(s))
    broken = Breaks(12, how="failed", at=LENGTH + _longest_question(seed) + ANSWER_TOKENS - 2)
    here = bench({"full": Method("full", broken, DenseStore())} | methods("h2o"), seed=seed)
    rows = rows_of(needle(here, settings(samples=4)))
    assert {label for label, _ in here.failures} == {"full"}
    assert {row.method for row in rows} == {"h2o"}
    (pooled,) = (row for row in rows if row.metric == "hit_rate" and row.depth is None)
    assert pooled.note is None


def test_a_prefill_that_fails_is_a_row_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measured.prefill

    def too_long(model: Any, ids: Tensor, rules: Any) -> Any:
        if ids.shape[1] >= LENGTH:
            raise torch.OutOfMemoryError("too long")
        return plain(model, ids, rules)

    monkeypatch.setattr(measured, "prefill", too_long)
    here = bench(methods("full", "h2o"))
    rows = rows_of(needle(here, settings(lengths=[LENGTH, 90])))
    assert {(row.method, row.context) for row in rows} == {("full", 90), ("h2o", 90)}
    assert [(label, row.status, row.context) for label, row in here.failures] == [
        ("full", "oom", LENGTH), ("h2o", "oom", LENGTH),
    ]  # fmt: skip
