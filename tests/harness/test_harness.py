"""lm-evaluation-harness through compressed caches, against plain transformers and against slow loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from kvbench.cache.build import Method
from kvbench.errors import UserError
from kvbench.models.load import LoadedModel
from tests.shared.models import random_llama
from tests.shared.text import CHARACTERS, character_tokenizer, light, loaded, methods, prose

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvbench.cache.store import DenseStore
from kvbench.harness.__main__ import main
from kvbench.harness.adapter import KVBenchLM, cut_at, generation_of
from kvbench.harness.evaluate import only_finite, score_rows
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.report.__main__ import main as report
from kvbench.report.compare.warnings import find_warnings
from kvbench.results.loading import find_runs, load
from kvbench.results.row import Row
from kvbench.results.run_files import read_status

CONTEXT, CONTINUATION = prose(60), " and so it went on"


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with light():
        yield


def tokenizer() -> PreTrainedTokenizerFast:
    made = character_tokenizer()
    made.eos_token = "="
    return made


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return loaded(random_llama(4, 2, 16, vocab=len(CHARACTERS) + 1), tokenizer())


def lm(tiny: LoadedModel, name: str, budget: int = 12, **settings: Any) -> KVBenchLM:
    return KVBenchLM(tiny, methods(name, budget=budget)[name], kernel="reference", **settings)


def ask(model: KVBenchLM, kind: str, *arguments: Any) -> Any:
    requests = [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]
    return getattr(model, kind)(requests, disable_tqdm=True)


def ids(tiny: LoadedModel, text: str) -> list[int]:
    return tiny.tokenizer(text)["input_ids"]


def plain(tiny: LoadedModel, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last `scored` tokens in one forward of the stock model."""
    logits = tiny.model(torch.tensor([tokens])).logits[0, :-1].float()[-scored:]
    targets = torch.tensor(tokens[-scored:])
    picked = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(picked.sum()), bool((logits.argmax(-1) == targets).all())


def masked(tiny: LoadedModel, tokens: list[int], sinks: int, window: int, exact: int) -> torch.Tensor:
    """Logits of one forward in which each query behind the first `exact` sees sinks and the newest tokens only.

    What is kept after a token: `sinks` first, `window` newest; the next query sees these and itself.
    """
    n = len(tokens)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (j <= i) & ((i < exact) | (j < sinks) | (j >= i - window))
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    return tiny.model(torch.tensor([tokens]), attention_mask=mask).logits[0]


def test_loglikelihoods_of_the_full_cache_are_one_plain_forward(tiny: LoadedModel) -> None:
    best = tiny.model(torch.tensor([ids(tiny, CONTEXT)])).logits[0, -1].argmax()
    requests = [
        (CONTEXT, CONTINUATION),
        (CONTEXT, "x"),
        (prose(30, 1), ", or not"),
        (CONTEXT, tiny.tokenizer.decode(best)),
        ("", "no context"),
    ]
    for held_back in (0, 1, 5):
        found = ask(lm(tiny, "full", held_back=held_back), "loglikelihood", *requests)
        for (context, continuation), (value, greedy) in zip(requests, found, strict=True):
            tokens = (ids(tiny, context) or [tiny.tokenizer.eos_token_id]) + ids(tiny, continuation)
            expected = plain(tiny, tokens, len(ids(tiny, continuation)))
            assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert [greedy for _, greedy in found] == [False, False, False, True, False]


@pytest.mark.parametrize("held_back", [0, 3])
def test_loglikelihoods_go_through_the_compressed_cache(tiny: LoadedModel, held_back: int) -> None:
    """Against the mask of a whole history: the context is exact, what follows sees sinks and window."""
    model = KVBenchLM(tiny, absolute(), kernel="reference", held_back=held_back)
    ((value, _),) = ask(model, "loglikelihood", (CONTEXT, CONTINUATION))
    tokens, scored = ids(tiny, CONTEXT + CONTINUATION), len(CONTINUATION)
    logits = masked(tiny, tokens, 2, 8, exact=len(CONTEXT) - held_back)[-scored - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[-scored:])[:, None]).sum()
    assert value == pytest.approx(float(expected), abs=1e-4)
    assert abs(value - plain(tiny, tokens, scored)[0]) > 1e-2
    counts = model.take()
    assert (counts.predicted, counts.engaged) == (scored, scored - (held_back == 0))
    assert counts.kept == [10]
    assert model.take().predicted == 0


def absolute() -> Method:
    return Method("streaming_llm", StreamingLLM(10, n_sink=2, variant="absolute"), DenseStore())


def test_one_token_is_scored_through_the_cache_only_where_the_context_is_held_back(tiny: LoadedModel) -> None:
    expected = plain(tiny, ids(tiny, CONTEXT + "x"), 1)[0]
    for held_back, engaged in ((0, 0), (1, 1)):
        model = lm(tiny, "h2o", held_back=held_back)
        ((value, _),) = ask(model, "loglikelihood", (CONTEXT, "x"))
        assert model.take().engaged == engaged
        assert (value == pytest.approx(expected, abs=1e-5)) == (held_back == 0)


def test_whole_texts_are_streams(tiny: LoadedModel) -> None:
    text = prose(40, 3)
    tokens = [tiny.tokenizer.eos_token_id, *ids(tiny, text)]
    (full,) = ask(lm(tiny, "full"), "loglikelihood_rolling", (text,))
    assert full == pytest.approx(plain(tiny, tokens, len(text))[0], abs=1e-4)
    (streamed,) = ask(KVBenchLM(tiny, absolute(), "reference"), "loglikelihood_rolling", (text,))
    logits = masked(tiny, tokens, 2, 8, exact=0)[:-1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).sum()
    assert streamed == pytest.approx(float(expected), abs=1e-4)


def test_long_texts_are_cut_into_windows_and_long_contexts_on_the_left(tiny: LoadedModel) -> None:
    short = LoadedModel(**{**vars(tiny), "max_positions": 16})
    text = prose(25, 4)
    tokens = [tiny.tokenizer.eos_token_id, *ids(tiny, text)]
    (found,) = ask(lm(short, "full"), "loglikelihood_rolling", (text,))
    expected = plain(tiny, tokens[:17], 16)[0] + plain(tiny, tokens[9:], 9)[0]
    assert found == pytest.approx(expected, abs=1e-4)
    model = lm(short, "full")
    ((value, _),) = ask(model, "loglikelihood", (CONTEXT, CONTINUATION[:5]))
    assert value == pytest.approx(plain(tiny, ids(tiny, CONTEXT[-12:] + CONTINUATION[:5]), 5)[0], abs=1e-4)
    assert model.take().cut == 1
    with pytest.raises(UserError, match="do not fit the 16 positions"):
        ask(model, "generate_until", (CONTEXT, {"max_gen_toks": 16}))


def test_a_method_without_a_stream_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(UserError, match="streams: .*leave such tasks out"):
        ask(lm(tiny, "recompute"), "loglikelihood_rolling", (CONTEXT,))


def test_answers_of_the_full_cache_are_those_of_generate(tiny: LoadedModel) -> None:
    expected = tiny.model.generate(
        torch.tensor([ids(tiny, CONTEXT)]),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=tiny.tokenizer.eos_token_id,
        pad_token_id=0,
    )
    text = tiny.tokenizer.decode(expected[0, len(CONTEXT) :], skip_special_tokens=True)
    assert len(text) > 5
    (found,) = ask(lm(tiny, "full"), "generate_until", (CONTEXT, {"max_gen_toks": 20, "until": ["\n\n\n"]}))
    assert found == text
    for stop in (text[3], text[2:5]):
        (found,) = ask(lm(tiny, "full"), "generate_until", (CONTEXT, {"max_gen_toks": 20, "until": stop}))
        assert found == text[: text.index(stop)]
    (other,) = ask(lm(tiny, "streaming_llm"), "generate_until", (CONTEXT, {"max_gen_toks": 20}))
    assert other[0] == text[0] and other != text


def test_generation_settings() -> None:
    assert generation_of({}, 7) == ([], 7)
    assert generation_of({"until": "a", "max_new_tokens": 3, "do_sample": False, "temperature": 0.7}, 7) == (["a"], 3)
    assert generation_of({"until": ["a", ""], "temperature": 0.0, "top_p": 0.9}, 7) == (["a"], 7)
    for kwargs, said in (
        ({"do_sample": True}, "do_sample=True is not greedy"),
        ({"temperature": 0.5}, "temperature=0.5"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
        ({"typical_p": 1}, "typical_p is"),
    ):
        with pytest.raises(UserError, match=said):
            generation_of(kwargs, 7)
    assert cut_at("one two three", ["three", "two"]) == "one "


def test_the_full_cache_answers_as_lm_evals_own_model(tiny: LoadedModel) -> None:
    """HFLM runs the stock model without any of this package: the same numbers, texts and greedy flags."""
    stock = HFLM(pretrained=random_llama(4, 2, 16, vocab=len(CHARACTERS) + 1), tokenizer=tokenizer(), batch_size=1)
    ours = lm(tiny, "full")
    pairs = [(prose(30, i), text) for i in range(2) for text in (" yes", " or no", "x")]
    for expected, found in zip(*(ask(model, "loglikelihood", *pairs) for model in (stock, ours)), strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])
    texts = [(prose(40, i),) for i in range(2)]
    assert ask(ours, "loglikelihood_rolling", *texts) == pytest.approx(ask(stock, "loglikelihood_rolling", *texts))
    asked = [(prose(30, i), {"until": ["e", "\n"], "max_gen_toks": 9, "do_sample": False}) for i in range(3)]
    assert ask(ours, "generate_until", *asked) == ask(stock, "generate_until", *asked)


# the command

CHOICE, ANSWER = (
    "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
)
DOCUMENTS = [{"question": prose(50, i), "choices": [" one", " or two", "!"], "answer": i % 3} for i in range(4)]


def test_logits_that_are_not_finite_leave_no_score(tiny: LoadedModel) -> None:
    broken = random_llama(4, 2, 16, vocab=len(CHARACTERS) + 1)
    model = lm(loaded(broken, tokenizer()), "full")
    ask(model, "loglikelihood", (CONTEXT, CONTINUATION))
    ask(model, "generate_until", (CONTEXT, {"max_gen_toks": 4, "until": []}))
    assert model.take().not_finite == 0
    broken.lm_head.weight.data[3] = float("nan")
    ask(model, "loglikelihood", (CONTEXT, CONTINUATION))
    ask(model, "generate_until", (CONTEXT, {"max_gen_toks": 4, "until": []}))
    counts = model.take()
    assert counts.not_finite == counts.predicted > len(CONTINUATION)


def test_rows_of_logits_that_are_not_finite_are_flagged() -> None:
    rows = [Row(metric="acc", value=1.0, low=0.5, high=1.0), Row(metric="acc_minus_full", value=0.0)]
    for finite, full_is_finite, left_out in ((True, True, []), (False, True, [0, 1]), (True, False, [1])):
        for i, (before, after) in enumerate(zip(rows, only_finite(rows, finite, full_is_finite), strict=True)):
            if i in left_out:
                assert np.isnan(after.value) and after.low is None and after.flags == "not_finite"
            else:
                assert after == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with tasks of local files and a tiny model with its tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    data = tmp_path / "own" / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, kind in (
        ("choice", CHOICE),
        ("answer", ANSWER + "generation_kwargs: {until: ['q'], max_gen_toks: 6}\n"),
        ("sampled", ANSWER + "generation_kwargs: {do_sample: true}\n"),
    ):
        (tmp_path / "own" / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n{kind}"
            f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path / 'cache'}}}\n"
        )
    random_llama(4, 2, 16, vocab=len(CHARACTERS) + 1, dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


WORDS = ["model=hub", "model.path=model", "include_path=own", "budget=12", "kernel=reference"]


def test_tasks_of_a_local_file_become_rows(folder: Path, tiny: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "compare=[h2o]", "tasks=choice,answer", "limit=3"]) == 0
    shown = capsys.readouterr()
    assert "run folder:" in shown.out
    (run,) = find_runs("results")
    assert read_status(run)["status"] == "ok"
    frame = load(run)
    assert set(zip(frame["method"], frame["dataset"], frame["metric"], strict=True)) == {
        *(
            (method, task, metric)
            for method in ("full", "h2o")
            for task, metric in (
                ("choice", "acc"),
                ("answer", "exact_match"),
                ("choice", "engaged"),
                ("answer", "engaged"),
                ("choice", "kept_tokens"),
                ("answer", "kept_tokens"),
            )
        ),
        ("h2o", "choice", "acc_minus_full"),
        ("h2o", "answer", "exact_match_minus_full"),
    }
    picked = [
        max(
            range(3),
            key=lambda i: plain(tiny, ids(tiny, d["question"] + " " + d["choices"][i]), len(d["choices"][i]) + 1)[0],
        )
        for d in DOCUMENTS[:3]
    ]
    right = sum(pick == d["answer"] for pick, d in zip(picked, DOCUMENTS, strict=False)) / 3
    accuracy = frame[(frame["method"] == "full") & (frame["metric"] == "acc")].iloc[0]
    assert accuracy["value"] == pytest.approx(right)
    assert (accuracy["n"], accuracy["protocol"], accuracy["bos"]) == (3, "lm_eval", "none")
    assert accuracy["low"] < accuracy["value"] < accuracy["high"] or right in (0, 1)
    kept = frame[frame["metric"] == "kept_tokens"].set_index(["method", "dataset"])["value"]
    assert kept["h2o", "choice"] == kept["h2o", "answer"] == 12
    assert kept["full", "choice"] > 50
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 2 * 3
    assert {"choice.lm_eval.json", "answer.lm_eval.json"} <= {file.name for file in run.iterdir()}
    assert report([str(run), "--out", "report"]) == 0
    assert "exact match" in Path("report/report.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tasks=sampled"], "do_sample=True is not greedy"),
        (["tasks=choice", "limit=0"], "limit=0 is neither"),
        (["tasks=choice", "held_back=-1"], "held_back=-1"),
        (["tasks=choice", "include_path=nowhere"], "include_path=nowhere is no folder"),
        ([], "no task is named"),
        (["tasks=choice", "budgt=3"], "budgt is no setting"),
        (["choice"], "is not KEY=VALUE"),
    ],
)
def test_unusable_input_is_one_line_and_leaves_nothing(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvbench: ")]
    assert len(lines) == 1 and said in lines[0]
    assert not Path("results").exists() or not list(Path("results").iterdir())


def test_a_task_that_fails_is_a_row_and_the_others_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own/broken.yaml").write_text(
        Path("own/choice.yaml").read_text().replace("documents", "gone").replace("task: choice", "task: broken")
    )
    assert main([*WORDS, "tasks=broken,choice", "limit=1"]) == 3
    frame = load("results")
    assert list(frame[frame["dataset"] == "broken"]["status"]) == ["failed"]
    assert "ok" in set(frame[frame["dataset"] == "choice"]["status"])
    assert "failed: full broken" in capsys.readouterr().err


def test_published_numbers_stand_beside_a_presets_tasks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "published.numbers=[{method: kivi2, metric: acc, value: 0.6623}]"
    words = [word for word in WORDS if not word.startswith("budget")]
    changed = ["residual=32", "group=8", "model.dtype=float32", "tasks=choice", "limit=2", numbers]
    assert main(["experiment=kivi_coqa", *words, *changed]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Beside published numbers" in shown and "kivi2 acc 0.6623" in shown
    assert "not the published setting (in brackets): bos none (first), dataset choice (coqa)" in shown


def found_of(values: list[float], higher: bool = True) -> dict[str, Any]:
    """What lm_eval returns of a task with one metric."""
    samples = [{"filter": "none", "em": value} for value in values]
    return {
        "results": {"t": {"em,none": float(np.mean(values))}},
        "samples": {"t": samples},
        "higher_is_better": {"t": {"em": higher}},
    }


def test_scores_above_full_are_doubted_and_those_of_a_blind_full_cache_are_uninformative() -> None:
    for higher, said in ((True, "better_than_full"), (False, None)):
        full: dict[tuple[str, str], list[float]] = {}
        list(score_rows(Row(), found_of([0.0] * 6 + [1.0] * 6, higher), full, is_baseline=True))
        score, difference = score_rows(Row(), found_of([1.0] * 12, higher), full, is_baseline=False)
        assert (score.flags, difference.flags) == (None, said)
    full = {}
    (blind,) = score_rows(Row(method="full", store="dense"), found_of([0.0] * 4), full, is_baseline=True)
    rows = list(score_rows(Row(method="h2o"), found_of([0.0] * 4), full, is_baseline=False))
    assert {row.flags for row in (blind, *rows)} == {"uninformative"}
    assert rows[1].value == 0 and rows[1].low is not None and rows[1].low < 0  # four pairs prove little
    told = find_warnings([replace(blind, measure="harness")])
    same = [finding.text for finding in told if finding.kind == "uninformative"]
    assert same == ["t: the full cache itself scores 0, so a method's score says nothing about compression"]
