"""save_kept=true: the file holds what the caches held, and the plot shows it."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import step
from kvbench.cache.store import DenseStore
from kvbench.cli.main import main
from kvbench.measures.needle import Needle
from kvbench.measures.needle.answers import ask_needles
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.perplexity.windows import score_windows
from kvbench.methods.pyramid import Pyramid
from kvbench.report.__main__ import main as report
from kvbench.report.figures.kept_tokens import _figure
from kvbench.results.kept_tokens import COUNTED, KEPT, Kept, read_kept, to_table
from kvbench.results.loading import find_runs
from kvbench.results.row import KNOBS, Row
from kvbench.texts.needle_tasks import TASKS
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, light, methods, prose, run_context_of

TOKENIZER = character_tokenizer()
TEXT = torch.tensor(TOKENIZER(prose(3_000))["input_ids"])
MODEL = random_llama(4, 2, 16, vocab=len(TOKENIZER), dtype=torch.float32)


def test_perplexity_saves_what_each_head_holds_after_each_window() -> None:
    pyramid = Method("pyramid", Pyramid(budget=12, window=4), DenseStore())
    named = {**methods("full", "h2o"), "pyramid": pyramid, **methods("streaming_llm")}
    context = run_context_of(MODEL, named, TEXT, TOKENIZER, save_kept=True)
    list(score_windows(context, Perplexity(context=60, tokens=9, windows=3, batch=2)))
    assert [(kept.row.method, kept.sample) for kept in context.journal.kept] == [
        (name, sample) for batch in ([0, 1], [2]) for name in ("h2o", "pyramid", "streaming_llm") for sample in batch
    ]
    stride = (len(TEXT) - 69) / 2
    for kept in context.journal.kept:
        ids = TEXT[int(kept.sample * stride) :][:69].unsqueeze(0)
        cache = build_cache(MODEL, named[str(kept.row.method)], ids[:, :60], 9)
        for t in range(60, 68):
            step(MODEL, ids[:, t : t + 1], cache)
        held = {layer.index: layer.kept_positions()[0].tolist() for layer in cache.layers}
        assert kept.layers == held
        assert (kept.row.measure, kept.row.context) == ("perplexity", 60)


def test_needle_saves_the_cache_at_the_end_of_the_answer() -> None:
    context = run_context_of(MODEL, methods("full", "streaming_llm"), TEXT, TOKENIZER, save_kept=True, save_tokens=True)
    (result,) = ask_needles(context, Needle(lengths=[120], depths=[0.0, 0.5], samples=2, question=["after"], batch=4))
    assert sorted(kept.sample for kept in context.journal.kept) == [0, 1, 2, 3]
    budget = context.methods[1].method.rule.tokens(120)
    for kept in context.journal.kept:
        fed = 120 + len(result.samples[kept.sample]["question_ids"]) + TASKS["single_number"].answer_tokens - 1
        expected = [*range(4), *range(fed - budget + 4, fed)]
        assert kept.layers == {0: [expected] * 2, 1: [expected] * 2}
        assert (kept.row.measure, kept.row.question) == ("needle", "after")


def test_a_run_writes_the_file_and_the_report_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "model=random-tiny",
        "data=random",
        "measure=[perplexity]",
        "perplexity.context=40",
        "perplexity.tokens=4",
        "compare=[streaming_llm,recompute]",
        "budget=12",
    ]
    with light():
        assert main(words) == 0
        assert main([*words, "save_kept=true", "rerun=all"]) == 0
    plain, saved = sorted(find_runs("results"), key=lambda run: (run / KEPT).exists())  # of one second, perhaps
    assert not (plain / KEPT).exists()
    tokens = pd.read_parquet(saved / KEPT)
    assert tokens.equals(read_kept([plain, saved]))
    assert set(tokens["method"]) == {"streaming_llm"} and set(tokens["budget"]) == {12.0}
    assert json.loads(tokens["knobs"].iloc[0])["decode"] == "evict"
    heads = tokens.groupby(["sample", "layer", "head"])["position"].apply(list)
    assert len(heads) == 2 * 2 * 2
    assert all(positions == [0, 1, 2, 3, *range(35, 43)] for positions in heads)
    assert report([str(saved)]) == 0
    page = (saved / "report" / "details.md").read_text()
    assert "(kept_perplexity_prefill_decode_40.png)" in page
    assert (saved / "report" / "kept_perplexity_prefill_decode_40.png").stat().st_size > 5_000


def kept(method: str, layers: dict[int, list[list[int]]], **more: object) -> Kept:
    row = Row(model="m", method=method, store="dense", budget=3, measure="perplexity", context=6, **more)
    return Kept(row, 0, layers)


def test_the_plot_is_dark_where_tokens_stayed() -> None:
    one, other = {0: [[0, 1, 7], [2, 3, 7]], 2: [[5, 6, 7], [0, 6, 7]]}, {0: [[7], [6, 7]], 2: [[7], [7]]}
    tokens = to_table([kept("h2o", one), kept("adaptive", other)], "run").to_pandas()
    figure, _ = _figure(tokens)
    first, second = figure.axes
    for axes, layers in ((first, one), (second, other)):
        shown = np.zeros((4, 8))
        for line, positions in enumerate([*layers[0], *layers[2]]):
            shown[line, positions] = 1
        assert np.array_equal(axes.images[0].get_array(), shown)
    assert first.get_title() == "h2o: 3 tokens a head"
    assert second.get_title() == "adaptive: 1 to 2 tokens a head"
    plt.close(figure)


def test_of_two_runs_of_one_method_the_last_counts(tmp_path: Path) -> None:
    for name, layers in (("a", {0: [[0]]}), ("b", {0: [[1]]})):
        (tmp_path / name).mkdir()
        to_table([kept("h2o", layers)], name).to_pandas().to_parquet(tmp_path / name / KEPT)
    tokens = read_kept([tmp_path / "a", tmp_path / "b"])
    assert tokens[["run", "position"]].to_numpy().tolist() == [["b", 1]]
    assert list(tokens.columns) == ["run", "model", *KNOBS, "measure", "protocol", "question", "context", *COUNTED]
    assert read_kept([]).empty
