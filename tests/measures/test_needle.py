"""Needle: prompts that hold what they should, hits that count the value alone, and compression before the question."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from scipy import stats
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.cache.decode import Continuation
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore
from kvbench.errors import UserError
from kvbench.measures import fallbacks as prefills
from kvbench.measures.context import RunContext
from kvbench.measures.needle import Needle, NeedleTask
from kvbench.measures.needle import answers as measured
from kvbench.measures.needle.answers import ask_needles
from kvbench.measures.statistics import wilson
from kvbench.models.load import LoadedModel
from kvbench.results.row import flags_of
from kvbench.texts.drafts import Draft, Words
from kvbench.texts.needle_tasks import TASKS, is_hit, recall
from kvbench.texts.prompts import Maker, Prompt, check_prompts, make_prompts
from kvbench.texts.templates import template_of
from tests.shared.models import random_llama
from tests.shared.text import (
    CHARACTERS,
    Breaks,
    character_tokenizer,
    limit_prefill,
    methods,
    prose,
    rows_of,
    run_context_of,
    value,
)

TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(3_000))["input_ids"])
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)
LENGTH = 120
ANSWER_TOKENS = TASKS["single_number"].answer_tokens


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer unless a test says so."""
    monkeypatch.setattr(measured, "end_tokens", lambda loaded: [])


def settings(**changes: Any) -> Needle:
    plain = Needle(lengths=[LENGTH], depths=[0.0, 0.5, 1.0], samples=2, question=["after"], batch=4)
    return dataclasses.replace(plain, **changes)


def one(seed: int, length: int, depth: float, sample: int) -> Prompt:
    maker = Maker(TOKENIZER, TEXT, seed, settings(), length)
    return maker.prompt(TASKS["single_number"], depth, sample)


def said(tokens: Tensor) -> Continuation:
    """These tokens as what a cache that was never compressed generates."""
    return Continuation(tokens, [False] * tokens.shape[1], torch.ones_like(tokens, dtype=torch.bool))


def bench(named: dict[str, Method], **more: Any) -> RunContext:
    return run_context_of(MODEL, named, TEXT, TOKENIZER, **more)


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
    [({"lengths": [40]}, "no room for the needle"), ({"lengths": [LENGTH, 4_000]}, "needle.lengths=4000")],
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
        (" -48213!", False),
        (" 48213th", False),
        (" 48213.5", False),
        (" 48213-", True),
        (" (48213).", True),
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
    (finding,) = ask_needles(bench(methods("full", "h2o", "kivi"), save_tokens=True), settings())
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
        assert all(len(method["answer"]) <= ANSWER_TOKENS for method in sample["methods"])  # a token is a character
    for depth, n in [(0.0, 2), (0.5, 2), (1.0, 2), (None, 6)]:
        (row,) = (r for r in finding.rows if r.method == "h2o" and r.metric == "hit_rate" and r.depth == depth)
        assert (row.n, row.context, row.question, row.batch) == (n, LENGTH, "after", 4)
        assert (row.low, row.high) == wilson(0, n)
    assert value(finding.rows, "h2o", "engaged") == 1
    assert value(finding.rows, "h2o", "kept_tokens") == 12
    assert value(finding.rows, "full", "engaged") == 0


def test_answers_do_not_depend_on_batches_or_on_other_methods() -> None:
    def answers(*names: str, batch: int) -> dict[tuple[str, str], str]:
        (finding,) = ask_needles(bench(methods(*names)), settings(samples=3, batch=batch))
        return {
            (sample["sha256"], method["method"]): method["answer"]
            for sample in finding.samples
            for method in sample["methods"]
        }

    together = answers("full", "h2o", "kivi", "random", batch=4)
    assert len(together) == 9 * 4
    assert answers("full", "random", "kivi", "h2o", batch=1) == together
    alone = answers("full", "kivi", batch=3)
    assert alone == {key: answer for key, answer in together.items() if key[1] in ("full", "kivi")}


@pytest.mark.parametrize("question", ["after", "before"])
def test_what_is_compressed_ends_before_or_after_the_question(question: str) -> None:
    rule = Spy(12)
    asked = settings(depths=[0.5], samples=1, question=[question])
    rows = rows_of(ask_needles(bench(methods("full") | {"spy": Method("spy", rule, DenseStore())}), asked))
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
    def answer(model: object, question: object, cache: Any, count: int) -> Continuation:
        found = cache.kept_tokens == 12 or cache.last_logits[0, 0] > threshold
        token = TOKENIZER.convert_tokens_to_ids("1" if found else "x")
        return said(torch.full((cache.last_logits.shape[0], count), token))

    monkeypatch.setattr(measured, "continuation", answer)
    monkeypatch.setattr(measured, "score", lambda asked, text: float(text[0] == "1"))
    threshold = torch.inf  # the full cache finds nothing
    rows = rows_of(ask_needles(bench(methods("full", "h2o")), settings(batch=1)))
    assert value(rows, "full", "hit_rate", depth=None) == 0
    assert value(rows, "h2o", "hit_rate", depth=None) == 1
    rates = [row for row in rows if row.metric == "hit_rate"]
    assert all(flags_of(row) == {"uninformative"} for row in rates)
    threshold = -torch.inf  # the full cache finds all
    rows = rows_of(ask_needles(bench(methods("full", "h2o")), settings(batch=1)))
    assert value(rows, "full", "hits", depth=None) == 6
    assert all(row.flags is None for row in rows)
    assert {row.metric for row in rows if row.note} == {"hit_rate_beyond_recent", "hit_rate_within_recent"}


@pytest.mark.slow
def test_a_real_model_finds_the_needle_with_a_full_cache_and_not_without_it(
    smollm2: LoadedModel, essays_folder: Any
) -> None:
    text = "".join(file.read_text() for file in sorted(essays_folder.glob("*.txt"))[:8])
    tokens = torch.tensor(smollm2.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    asked = settings(lengths=[512], depths=[0.2, 0.6], samples=2)
    rows = rows_of(
        ask_needles(
            run_context_of(smollm2.model, methods("full", "random", budget=32), tokens, smollm2.tokenizer), asked
        )
    )
    assert value(rows, "full", "hit_rate", depth=None) == 1
    assert value(rows, "random", "hit_rate", depth=None) < 0.5


def test_what_follows_the_end_of_an_answer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has ended and goes on may come to the value by itself."""

    def answer(model: object, question: object, cache: Any, count: int) -> Continuation:
        return said(torch.tensor([TOKENIZER("= 12345")["input_ids"]] * cache.last_logits.shape[0]))

    monkeypatch.setattr(measured, "continuation", answer)
    monkeypatch.setattr(measured, "score", lambda asked, text: float(text.endswith("12345")))
    for ends, rate in (([], 1), ([TOKENIZER.convert_tokens_to_ids("=")], 0)):
        monkeypatch.setattr(measured, "end_tokens", lambda loaded, ends=ends: ends)
        assert value(rows_of(ask_needles(bench(methods("full")), settings())), "full", "hit_rate", depth=None) == rate


def test_prompts_that_were_checked_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(lengths=[LENGTH, 90])
    made = check_prompts(TOKENIZER, TEXT, 0, asked, None)
    plain = rows_of(ask_needles(bench(methods("full", "h2o")), asked))
    monkeypatch.setattr(measured, "make_prompts", None)
    assert rows_of(ask_needles(bench(methods("full", "h2o"), prepared={"needle": made}), asked)) == plain


def test_bos_counts_as_a_token_of_the_length() -> None:
    plain = make_prompts(TOKENIZER, TEXT, 0, settings(), LENGTH)
    longer = make_prompts(TOKENIZER, TEXT, 0, settings(), LENGTH, bos=(7, 8))
    assert all(prompt.ids[:2] == [7, 8] and len(prompt.ids) == LENGTH for prompt in longer)
    begun = make_prompts(TOKENIZER, TEXT, 0, settings(), LENGTH, bos=(7,))
    assert {len(prompt.ids) for prompt in (*plain, *begun)} == {LENGTH}
    assert all(prompt.ids[0] == 7 for prompt in begun)
    assert all(needle in TOKENIZER.decode(prompt.ids) for prompt in begun for needle in prompt.draft.needles)


def test_finding_more_than_the_full_cache_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the interval of the paired differences, that is."""

    def answer(model: object, question: object, cache: Any, count: int) -> Continuation:
        rows = cache.last_logits.shape[0]
        found = [cache.kept_tokens == 12 or row == 0 for row in range(rows)]
        return said(torch.tensor([[TOKENIZER.convert_tokens_to_ids("1" if hit else "x")] for hit in found]))

    monkeypatch.setattr(measured, "continuation", answer)
    monkeypatch.setattr(measured, "score", lambda asked, text: float(text[0] == "1"))
    rows = rows_of(ask_needles(bench(methods("full", "h2o")), settings(samples=4, batch=4)))
    (pooled,) = (row for row in rows if row.metric == "hit_rate_minus_full" and row.depth is None)
    assert pooled.value is not None and pooled.value > 0 and pooled.low is not None and pooled.low > 0
    assert flags_of(pooled) == {"better_than_full"}
    assert all(row.flags is None for row in rows if row.metric == "hit_rate")


# engaged, and logits that are not finite


@pytest.mark.parametrize(
    ("budget", "after", "before"), [(200, 0.0, 0.0), (12, 1.0, (ANSWER_TOKENS - 1) / ANSWER_TOKENS)]
)
def test_engaged_is_the_share_of_the_answer_that_was_predicted_after_an_eviction(
    budget: int, after: float, before: float
) -> None:
    """Before the prompt ends nothing is evicted: a question in it is answered by one token of the full cache's."""
    rows = rows_of(ask_needles(bench(methods("full", "h2o", budget=budget)), settings(question=["after", "before"])))
    assert value(rows, "h2o", "engaged", question="after") == after
    assert value(rows, "h2o", "engaged", question="before") == pytest.approx(before)


def test_engaged_counts_evictions_while_the_question_and_the_answer_are_fed() -> None:
    asked = settings(depths=[0.5], samples=1)
    (prompt,) = make_prompts(TOKENIZER, TEXT, 0, asked, LENGTH)
    question = len(prompt.question)
    for budget, share in (
        (LENGTH + question - 1, (ANSWER_TOKENS - 1) / ANSWER_TOKENS),
        (LENGTH + question + 2, (ANSWER_TOKENS - 4) / ANSWER_TOKENS),
    ):
        rows = rows_of(ask_needles(bench(methods("full", "h2o", budget=budget)), asked))
        assert value(rows, "h2o", "engaged") == pytest.approx(share)


def test_answers_from_logits_that_are_not_finite_are_undefined_and_flagged() -> None:
    broken = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    rows = rows_of(ask_needles(run_context_of(broken, methods("full", "h2o"), TEXT, TOKENIZER), settings()))
    scored = [row for row in rows if row.metric in ("hit_rate", "hits", "hit_rate_minus_full")]
    assert len(scored) == 5 * 4  # three depths and all of them: two metrics of the full cache, three of h2o
    for row in scored:
        assert flags_of(row) == {"not_finite"} and row.value != row.value and (row.low, row.high) == (None, None)


# failures


@pytest.mark.parametrize("how", ["failed", "oom"])
def test_one_broken_method_leaves_the_others_whole(how: str) -> None:
    asked = settings(lengths=[LENGTH, 90])
    clean = rows_of(ask_needles(bench(methods("full", "h2o")), asked))
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=LENGTH - 1), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(ask_needles(here, asked))
    assert [row for row in rows if row.method != "breaks"] == clean
    assert {row.context for row in rows if row.method == "breaks"} == {90}
    ((label, row),) = here.journal.failures
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
    rows = rows_of(ask_needles(here, settings(samples=4)))
    assert {label for label, _ in here.journal.failures} == {"full"}
    assert {row.method for row in rows} == {"h2o"}
    (pooled,) = (row for row in rows if row.metric == "hit_rate" and row.depth is None)
    assert pooled.note is None


def test_a_prefill_that_fails_is_a_row_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_prefill(monkeypatch, prefills, LENGTH)
    here = bench(methods("full", "h2o"))
    rows = rows_of(ask_needles(here, settings(lengths=[LENGTH, 90])))
    assert {(row.method, row.context) for row in rows} == {("full", 90), ("h2o", 90)}
    assert [(label, row.status, row.context) for label, row in here.journal.failures] == [
        ("full", "oom", LENGTH),
        ("h2o", "oom", LENGTH),
    ]


# tasks of RULER, and questions after RULER's

RULER = tuple(name for name in TASKS if name != "single_number")


def words_of(length: int = 120) -> Words:
    return Words([f"{a}{b}ish" for a in "bcdfgh" for b in ("ar", "el", "in", "om", "ur", "yt", "ast", "ond")], length)


def drafted(task: str, seed: int = 0, length: int = 120) -> Draft:
    return TASKS[task].draft(random.Random(seed), words_of(length))


def test_answers_are_as_long_as_rulers() -> None:
    asked = settings(tasks=["niah_single_2", "vt", "cwe"], depths=[0.5], samples=1, lengths=[2_500])
    by_task = {prompt.task.name: prompt for prompt in make_prompts(TOKENIZER, TEXT, 0, asked, 2_500)}
    assert by_task["niah_single_2"].answer_tokens == 128
    for task, least in (("vt", 30), ("cwe", 120)):
        taken = len(TOKENIZER(", ".join(by_task[task].draft.references))["input_ids"])
        assert by_task[task].answer_tokens == max(least, taken)


def test_settings_name_every_task() -> None:
    assert get_args(NeedleTask) == tuple(TASKS)


@pytest.mark.parametrize(
    ("task", "needles", "references"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multikey_2", 1, 1),
        ("niah_multikey_3", 1, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
        ("vt", 5, 5),
        ("cwe", 0, 10),
        ("fwe", 0, 3),
        ("qa_one_hop", 1, 1),
        ("qa_two_hop", 2, 1),
    ],
)
def test_a_task_hides_and_asks_for_what_ruler_does(task: str, needles: int, references: int) -> None:
    draft = drafted(task)
    assert (len(draft.needles), len(set(draft.references))) == (needles, references)
    hidden = "".join(draft.needles)
    for reference in draft.references if needles else ():
        assert reference in hidden
        assert reference not in draft.question + draft.lead
    kind = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if task in ("niah_single_3", "niah_multikey_3") else r"\d{7}"
    if task.startswith("niah"):
        assert all(re.fullmatch(kind, reference) for reference in draft.references)


def test_a_chain_can_be_followed_from_the_value_to_every_name() -> None:
    draft = drafted("vt")
    value = re.findall(r"\d+", draft.question)[0]
    known = {value}
    for statement in draft.needles:
        name, source = re.fullmatch(r"\nVAR (\w+) = (?:VAR )?(\w+)\n", statement).groups()  # type: ignore[union-attr]
        assert source in known
        known.add(name)
    assert known - {value} == set(draft.references)


@pytest.mark.parametrize(("length", "often", "seldom", "example"), [(1024, 6, 1, (3, 1)), (4096, 30, 3, (10, 3))])
def test_common_words_are_the_most_common(length: int, often: int, seldom: int, example: tuple[int, int]) -> None:
    draft = drafted("cwe", length=length)
    listed, answer = draft.opening.split("Question:")[0], draft.opening.split("most often are:")[-1].split("Below")[0]
    shown = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
    assert sorted(shown.values()) == sorted([example[0]] * 10 + [example[1]] * (10 if length < 4096 else 30))
    assert {word for word, n in shown.items() if n == example[0]} == set(re.findall(r"\d+\. ([a-z]+)", answer))
    assert callable(draft.haystack)
    text = draft.haystack(20)
    counts = Counter(re.findall(r"[a-z]+", text))
    assert {word for word, n in counts.items() if n == often} == set(draft.references)
    assert sorted(counts.values()) == [seldom] * 20 + [often] * 10
    assert [int(number) for number in re.findall(r"\d+", text)] == list(range(1, sum(counts.values()) + 1))


def test_a_haystack_of_needles_has_no_second_answer() -> None:
    draft = drafted("niah_multikey_2")
    assert callable(draft.haystack)
    text, (pin,) = draft.haystack(200), draft.needles
    key = re.findall(r"for ([\w-]+) is", pin)[0]
    assert text.count("One of the special magic numbers") == 201
    assert re.findall(rf"for {key} is: (\d+)", text) == list(draft.references)


@pytest.mark.parametrize("task", RULER)
def test_prompts_of_every_task_are_whole_and_of_exact_length(task: str) -> None:
    length = 2_500
    asked = settings(tasks=[task], samples=2, lengths=[length])
    prompts = make_prompts(TOKENIZER, TEXT, 0, asked, length)
    assert len(prompts) == 6
    assert {prompt.depth for prompt in prompts} == ({0.0, 0.5, 1.0} if TASKS[task].grid else {None})
    assert len({tuple(prompt.ids) for prompt in prompts}) == 6
    for prompt in prompts:
        text = TOKENIZER.decode(prompt.ids)
        assert len(prompt.ids) == length
        assert all(needle in text for needle in prompt.draft.needles)
    again = make_prompts(TOKENIZER, TEXT, 0, asked, length)
    assert [(p.ids, p.question) for p in again] == [(p.ids, p.question) for p in prompts]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("1234567 and 7654321", 1),
        ("7654321", 0.5),
        ("They are 1234567.", 0.5),
        ("", 0),
        ("91234567", 0),
        ("1234567.5 and -7654321", 0),
        ("1234567th", 0),
        ("12345678 7654321", 0.5),
        ("the special magic numbers are", 0),
    ],
)
def test_recall_counts_values_that_stand_alone(answer: str, score: float) -> None:
    assert recall(answer, ["1234567", "7654321"]) == score


def test_recall_takes_names_in_any_case() -> None:
    assert recall("abcde, fghij-1", ["ABCDE", "FGHIJ"]) == 0.5


def test_two_times_of_asking_are_two_columns() -> None:
    rows = rows_of(ask_needles(bench(methods("full", "h2o")), settings(question=["after", "before"])))
    assert {row.question for row in rows} == {"after", "before"}
    alone = rows_of(ask_needles(bench(methods("full", "h2o")), settings(question=["before"])))
    assert [row for row in rows if row.method == "h2o" and row.question == "before"] == [
        row for row in alone if row.method == "h2o"
    ]


def test_several_tasks_are_rows_under_their_names() -> None:
    asked = settings(tasks=["single_number", "niah_multivalue"], lengths=[700])
    found = list(ask_needles(bench(methods("full", "h2o")), asked))
    assert [{row.protocol for row in each.rows} for each in found] == [{"single_number"}, {"niah_multivalue"}]
    assert [len(each.samples) for each in found] == [6, 6]
    (row,) = (
        r
        for r in found[1].rows
        if r.method == "h2o" and r.metric == "hit_rate_minus_full" and r.protocol == "niah_multivalue"
    )
    assert (row.depth, row.n) == (None, 6)


def test_shuffled_prompts_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured.make_prompts

    def shuffled(*arguments: Any) -> list[Prompt]:
        return list(reversed(made(*arguments)))

    def found() -> dict[tuple[str, ...], Any]:
        rows = rows_of(ask_needles(bench(methods("full", "h2o", "random")), settings(samples=3)))
        return {(r.method, r.metric, str(r.depth)): (r.value, r.low, r.high) for r in rows}

    before = found()
    monkeypatch.setattr(measured, "make_prompts", shuffled)
    assert found() == before


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


def test_a_chat_template_goes_around_the_prompt_and_into_the_row() -> None:
    tokenizer = character_tokenizer(CHARACTERS + "<>/")
    tokenizer.chat_template = CHAT
    text = torch.tensor(tokenizer(prose(1_000))["input_ids"])
    asked = settings(template="chat", depths=[0.5], samples=1)
    (prompt,) = make_prompts(tokenizer, text, 0, asked, LENGTH)
    assert tokenizer.decode(prompt.ids).startswith("<user>")
    assert make_prompts(tokenizer, text, 0, asked, LENGTH, bos=(7,))[0].ids == prompt.ids  # a template brings its own
    assert tokenizer.decode(prompt.question).startswith(f"{prompt.draft.question}</s><assistant>")
    model = random_llama(4, 2, 16, vocab=len(tokenizer), dtype=torch.float32)
    rows = rows_of(ask_needles(run_context_of(model, methods("full"), text, tokenizer), asked))
    assert {row.bos for row in rows} == {None}
    expected = hashlib.sha256(CHAT.encode()).hexdigest()[:12]
    assert all(expected in (row.note or "") for row in rows)
    with pytest.raises(UserError, match="has no chat template"):
        template_of(TOKENIZER, "chat")
