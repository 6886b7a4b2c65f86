"""Published tasks: their metrics against values worked out by hand, files in place of the hub, rows of each method."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.measures.statistics import wilson
from kvbench.measures.tasks import Tasks
from kvbench.measures.tasks.answers import answer_tasks
from kvbench.results.row import flags_of
from kvbench.texts import task_sets
from kvbench.texts.answer_metrics import (
    ANSWER_TOKENS,
    LONGBENCH,
    classification,
    code,
    f1,
    longbench,
    normal,
    numbers,
    rouge_l,
    ruler,
)
from kvbench.texts.task_sets import NAMES, Sample, check_tasks, encode, files_fingerprint, load_samples
from kvbench.texts.templates import Template
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, methods, prose, rows_of, run_context_of, value

TOKENIZER = character_tokenizer()
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)


def settings(path: Path | None, **changes: Any) -> Tasks:
    plain: dict[str, Any] = {
        "set": "longbench",
        "names": ["hotpotqa"],
        "samples": 3,
        "longest": 120,
        "question": ["after"],
        "path": None if path is None else str(path),
    }
    return Tasks(**(plain | changes))


def write(folder: Path, name: str, count: int = 4, **columns: Any) -> Path:
    rows = [
        {
            "context": prose(300, seed=i),
            "question": f"\nWhat is {i}?",
            "answer_prefix": " It is",
            "answers": [f"value {i}"],
            "max_new_tokens": 6,
            "all_classes": None,
            **columns,
        }
        for i in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# metrics


def test_words_are_compared_without_articles_punctuation_and_case() -> None:
    assert normal("The  Cat, a dog; AN owl!") == ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("the cat", "Cat.", 1.0),
        ("a cat and a dog", "cat", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("dog dog", "dog", 2 * 0.5 / 1.5),
        ("", "cat", 0.0),
        ("owl", "cat", 0.0),
    ],
)
def test_f1(answer: str, reference: str, score: float) -> None:
    assert f1(answer, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("Paragraph 7", 1.0), ("7", 1.0), ("Paragraph 7, or 8", 0.5), ("Paragraph 17", 0.0), ("seven", 0.0)],
)
def test_numbers(answer: str, score: float) -> None:
    assert numbers(answer, "Paragraph 7") == score
    assert numbers(answer, "none") == 0


@pytest.mark.parametrize(
    ("answer", "score"), [("City", 1.0), ("City or Other city", 0.5), ("Number", 0.0), ("Other location", 0.0)]
)
def test_classes_named_beside_the_right_one_count_against_it(answer: str, score: float) -> None:
    assert classification(answer, "City", ["City", "Other city", "Number"]) == score


def test_a_part_of_the_right_class_is_no_class_of_its_own() -> None:
    assert classification("Other city", "Other city", ["city", "Other city", "Number"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "score"), [("\n# so\n```\nx = 1\ny = 2", 1.0), ("x = 2", 0.8), ("// nothing", 0.0), ("", 0.0)]
)
def test_code_is_its_first_line(answer: str, score: float) -> None:
    assert code(answer, "x = 1") == score


def test_rouge_l_by_hand() -> None:
    pytest.importorskip("rouge")
    # The longest common subsequence of 4 and 5 words is 3: precision 3/4, recall 3/5.
    assert rouge_l("a b c d", "a x b c y") == pytest.approx(2 * 0.75 * 0.6 / 1.35, abs=1e-6)
    assert rouge_l("", "a b") == 0.0


def test_rouge_l_of_an_answer_that_babbles() -> None:
    """A sentence of a thousand words is deeper than Python's stack, as a broken cache writes them."""
    pytest.importorskip("rouge")
    before = sys.getrecursionlimit()
    words = " ".join(f"w{i}" for i in range(900))
    assert rouge_l(words, f"w3 {'x ' * 300}w7") == pytest.approx(2 * 2 / (900 + 3), rel=1e-3)  # different words
    assert sys.getrecursionlimit() == before


def test_the_best_reference_counts_and_of_sets_with_examples_the_first_line() -> None:
    assert longbench("hotpotqa", "dog", ["cat", "dog"]) == 1.0
    assert longbench("triviaqa", "\ndog\nQuestion: and now?", ["dog"]) == 1.0
    assert longbench("trec", "\n City\nand Number", ["City"], ["City", "Number"]) == 1.0
    assert longbench("hotpotqa", "dog\nQuestion: and now?", ["dog"]) < 1.0
    assert set(NAMES["longbench"]) == set(LONGBENCH)


def test_ruler_counts_references_and_takes_one_document_answer() -> None:
    assert ruler("niah_multivalue", "123 and 456", ["123", "456", "789", "000"]) == 0.5
    assert ruler("qa_1", "in PARIS", ["Paris", "Lutetia"]) == 1.0


# samples


def test_samples_come_from_files_in_order(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    loaded = load_samples(settings(tmp_path), "hotpotqa")
    assert [sample.question for sample in loaded] == [f"\nWhat is {i}?" for i in range(3)]
    assert loaded[0] == Sample(prose(300), "\nWhat is 0?", " It is", ["value 0"], 6, [])


def test_parquet_files_too(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame([{"context": "c", "question": "q", "answer": ["1", "2"], "max_new_tokens": 9}]).to_parquet(
        tmp_path / "vt.parquet"
    )
    (sample,) = load_samples(settings(tmp_path, set="ruler", names=["vt"]), "vt")
    assert (sample.references, sample.answer_prefix, sample.answer_tokens) == (["1", "2"], "", 9)


def test_what_cannot_be_had_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"has no hotpotqa.jsonl"):
        check_tasks(settings(tmp_path), None, TOKENIZER)
    with pytest.raises(UserError, match="choose from narrativeqa"):
        check_tasks(settings(tmp_path, names=["dureader"]), None, TOKENIZER)
    write(tmp_path, "hotpotqa")
    with pytest.raises(UserError, match="answers of 6 tokens do not fit .*; type tasks.longest=2042 or less"):
        check_tasks(settings(tmp_path, longest=2043), 2048, TOKENIZER)
    assert set(check_tasks(settings(tmp_path, longest=2042), 2048, TOKENIZER)) == {"hotpotqa"}
    monkeypatch.setattr(task_sets, "hub_or_cache", lambda: False)
    with pytest.raises(UserError, match="type tasks.path=FOLDER"):
        check_tasks(settings(None), None, TOKENIZER)
    for columns, said in (
        ({"question": None}, "sample 0 of hotpotqa lacks question"),
        ({"answers": []}, "lacks answers"),
        ({"context": " "}, "has an empty context"),
        ({"max_new_tokens": "ten"}, "max_new_tokens=ten is not a whole"),
        ({"max_new_tokens": -4}, "max_new_tokens=-4 is not"),
    ):
        write(tmp_path, "hotpotqa", **columns)
        with pytest.raises(UserError, match=said):
            check_tasks(settings(tmp_path), None, TOKENIZER)
    for content, said in (("{", "cannot load hotpotqa"), ("", "holds no samples")):
        (tmp_path / "hotpotqa.jsonl").write_text(content)
        with pytest.raises(UserError, match=said):
            check_tasks(settings(tmp_path), None, TOKENIZER)


def test_answers_are_as_long_as_longbench_publishes_them(tmp_path: Path) -> None:
    for given, taken in ((52, 32), (6, 6), (None, 32)):  # copies of the set allow 20 more
        write(tmp_path, "hotpotqa", max_new_tokens=given)
        assert {sample.answer_tokens for sample in load_samples(settings(tmp_path), "hotpotqa")} == {taken}
    assert set(ANSWER_TOKENS) == set(LONGBENCH)


def test_what_ruler_hides_is_not_cut_away(tmp_path: Path) -> None:
    """A needle in the middle of a prompt that loses its middle is no longer there."""
    write(tmp_path, "vt")
    whole = 300 + len("\nWhat is 0?" + " It is")
    asked = settings(tmp_path, set="ruler", names=["vt"], longest=whole)
    assert set(check_tasks(asked, None, TOKENIZER)) == {"vt"}
    for given, bos, needed in ((whole - 1, (), whole), (whole, (7,), whole + 1)):
        with pytest.raises(UserError, match=f"type tasks.longest={needed}"):
            check_tasks(replace(asked, longest=given), None, TOKENIZER, bos)
    write(tmp_path, "hotpotqa")  # as LongBench cuts it
    assert check_tasks(settings(tmp_path, longest=100), None, TOKENIZER)


def test_other_files_are_other_numbers(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    before = files_fingerprint(settings(tmp_path))
    assert files_fingerprint(settings(tmp_path)) == before
    write(tmp_path, "hotpotqa", count=5)
    assert files_fingerprint(settings(tmp_path)) != before


def test_long_contexts_lose_their_middle() -> None:
    sample = Sample("abcdefghij" * 10, "\nwhat?", " so", ["x"], 4, [])
    context, question = encode(TOKENIZER, sample, 40, Template("<", ">"))
    assert TOKENIZER.decode(question) == "\nwhat?# so"  # this tokenizer does not know the template's signs
    assert len(context) + len(question) <= 40
    # The first and the last half of the whole prompt, as LongBench cuts it.
    whole = "<" + sample.context + TOKENIZER.decode(question)
    assert TOKENIZER.decode(context + question) == "#" + whole[1:20] + whole[-20:]
    short = Sample("abc", "\nwhat?", "", ["x"], 4, [])
    assert TOKENIZER.decode(encode(TOKENIZER, short, 40, Template())[0]) == "abc"


# the measure


def test_every_method_answers_and_is_paired_with_the_full_cache(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    bench = run_context_of(MODEL, methods("full", "h2o", "kivi"), torch.zeros(10, dtype=torch.int64), TOKENIZER)
    (finding,) = answer_tasks(bench, settings(tmp_path, question=["after", "before"]))
    assert {(row.protocol, row.question, row.n) for row in finding.rows} == {
        ("longbench/hotpotqa", "after", 3),
        ("longbench/hotpotqa", "before", 3),
    }
    rates = {row.method for row in finding.rows if row.metric == "score_minus_full"}
    assert rates == {"h2o", "kivi"}
    for row in finding.rows:
        if row.metric == "score":
            own = [
                m["score"]
                for s in finding.samples
                for m in s["methods"]
                if (m["method"], s["question"]) == (row.method, row.question)
            ]
            assert row.value == pytest.approx(sum(own) / 3)
    after = [row for row in finding.rows if row.question == "after"]
    assert value(after, "h2o", "engaged") == 1
    assert value(after, "h2o", "kept_tokens") == 12


def test_engaged_counts_evictions_while_the_answer_is_fed(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    bench = run_context_of(MODEL, methods("full"), torch.zeros(10, dtype=torch.int64), TOKENIZER, save_tokens=True)
    (finding,) = answer_tasks(bench, settings(tmp_path, samples=1))
    sample = finding.samples[0]
    held = len(sample["ids"]) + len(sample["question_ids"])
    named = methods("full", "h2o", budget=held + 3)
    compared = run_context_of(MODEL, named, bench.tokens, TOKENIZER)
    rows = rows_of(answer_tasks(compared, settings(tmp_path, samples=1)))
    assert value(rows, "h2o", "engaged") == pytest.approx(1 / 6)  # the first five of six tokens follow no eviction
    assert value(rows, "full", "engaged") == 0


def test_a_task_answered_from_logits_that_are_not_finite_is_undefined_and_flagged(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    broken = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    bench = run_context_of(broken, methods("full", "h2o"), torch.zeros(10, dtype=torch.int64), TOKENIZER)
    scored = [row for row in rows_of(answer_tasks(bench, settings(tmp_path))) if row.metric.startswith("score")]
    assert len(scored) == 3
    assert all(flags_of(row) == {"not_finite"} and row.value != row.value for row in scored)


def test_prompts_begin_with_bos_where_windows_do(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    bench = run_context_of(MODEL, methods("full"), torch.zeros(10, dtype=torch.int64), TOKENIZER, save_tokens=True)
    (plain,) = answer_tasks(bench, settings(tmp_path))
    (begun,) = answer_tasks(replace(bench, bos=(7,)), settings(tmp_path))
    for before, after in zip(plain.samples, begun.samples, strict=True):
        assert after["ids"][0] == 7 and len(after["ids"]) == len(before["ids"])
        assert after["ids"][1:60] == before["ids"][:59]
        assert after["question_ids"] == before["question_ids"]


def test_a_task_that_full_fails_is_uninformative_and_more_than_full_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "hotpotqa", count=12)
    bench = run_context_of(MODEL, methods("full", "h2o"), torch.zeros(10, dtype=torch.int64), TOKENIZER)
    asked = settings(tmp_path, samples=12)
    scores = iter([0.0] * 24)
    monkeypatch.setitem(task_sets.SCORES, "longbench", lambda *_: next(scores))
    (finding,) = answer_tasks(bench, asked)
    rates = {row.metric: row for row in finding.rows if row.method == "h2o"}
    for metric in ("score", "score_minus_full"):
        assert flags_of(rates[metric]) == {"uninformative"}
    assert (rates["score"].low, rates["score"].high) == pytest.approx(wilson(0, 12))
    scores = iter([0.0, 1.0] * 6 + [1.0, 1.0] * 6)  # full, then h2o, prompt by prompt
    (finding,) = answer_tasks(bench, asked)
    rates = {row.metric: row for row in finding.rows if row.method == "h2o"}
    assert rates["score_minus_full"].value == 0.5
    assert flags_of(rates["score_minus_full"]) == {"better_than_full"}
    assert rates["score"].flags is None


def test_a_task_that_fails_leaves_the_next_alone(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa")
    write(tmp_path, "musique")
    bench = run_context_of(MODEL, methods("full"), torch.zeros(10, dtype=torch.int64), TOKENIZER)
    with bench.guarded(bench.methods[0], "tasks", context=120, protocol="longbench/hotpotqa"):
        raise RuntimeError("broken")
    rows = rows_of(answer_tasks(bench, settings(tmp_path, names=["hotpotqa", "musique"])))
    assert {row.protocol for row in rows} == {"longbench/musique"}


def test_a_file_that_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "hotpotqa")
    write(tmp_path, "qasper", answers=[])
    words = ["measure=[tasks]", "tasks.names=[hotpotqa,qasper]", f"tasks.path={tmp_path}", "tasks.longest=100"]
    assert main([*words, f"results_dir={tmp_path / 'results'}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "kvbench: sample 0 of qasper lacks answers; a sample has context, question and answers"
    ]
    assert not (tmp_path / "results").exists()


def test_unusable_settings_exit_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, answer in (
        (["tasks.names=[dureader]"], "choose from"),
        (["tasks.set=leval"], "type tasks.set=longbench or tasks.set=ruler"),
        ([f"tasks.path={tmp_path}"], "has no hotpotqa.jsonl"),
        (["model=random-tiny", "data=random"], "needs words"),
    ):
        results = tmp_path / "results"
        assert main(["measure=[tasks]", *words, f"results_dir={results}"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and answer in lines[0], lines
        assert not results.exists()


def write_problems(folder: Path) -> None:
    rows = [{"problem": f"What is {i} + {i}? {prose(60, seed=i)}", "answer": 2 * i} for i in range(3)]
    (folder / "math_500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_mathematical_problems_come_from_files_and_are_worked_out_in_the_answer(tmp_path: Path) -> None:
    write_problems(tmp_path)
    chosen = settings(tmp_path, set="math", names=["math_500"], samples=2, answer_tokens=30)
    samples = load_samples(chosen, "math_500")
    assert [(sample.references, sample.question, sample.answer_tokens) for sample in samples] == [
        (["0"], "", 30),
        (["2"], "", 30),
    ]
    assert samples[1].context.startswith("What is 1 + 1?") and "\\boxed{}" in samples[1].context
    assert load_samples(replace(chosen, answer_tokens=None), "math_500")[0].answer_tokens == 2048
    here = run_context_of(MODEL, methods("full", "h2o"), torch.zeros(10, dtype=torch.int64), TOKENIZER)
    rows = rows_of(answer_tasks(here, replace(chosen, longest=60)))
    assert value(rows, "h2o", "kept_tokens") == 12
    assert 0 < value(rows, "h2o", "engaged") < 1  # all but the token that the prompt itself predicts
    assert {row.dataset for row in rows} == {"math"}


def test_mathematical_problems_need_a_folder_and_two_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tasks.set=math reads files; type tasks.path=FOLDER"):
        check_tasks(settings(None, set="math", names=["aime_2024"]), None, TOKENIZER)
    (tmp_path / "aime_2024.jsonl").write_text('{"problem": "What is 1?"}\n')
    with pytest.raises(UserError, match="lacks problem or answer"):
        check_tasks(settings(tmp_path, set="math", names=["aime_2024"]), None, TOKENIZER)
