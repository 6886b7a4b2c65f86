"""From the command to the report: every first method on a tiny random model, and first_light on a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvbench.cli.main import main
from kvbench.models.load import LoadedModel
from kvbench.offline import cache_folder
from kvbench.report.__main__ import main as report
from kvbench.results.loading import find_runs, load
from kvbench.results.row import COLUMNS, SCHEMA
from tests.measures.test_perplexity import plain_nll
from tests.shared.text import light

METHODS = ("full", "recompute", "kivi", "kivi8", "kivi4", "kivi2", "h2o", "streaming_llm", "random")
CONTEXT, TOKENS = 96, 24
COMMAND = [
    "model=random-tiny",
    "data=random",
    "measure=[perplexity,memory,latency]",
    "budget=40",
    "residual=32",
    f"compare=[{','.join(METHODS)},h2o+int4,full+int8]",
    f"perplexity.context={CONTEXT}",
    f"perplexity.tokens={TOKENS}",
    f"memory.contexts=[{CONTEXT}]",
    "memory.tokens=8",
    "memory.isolate=false",
    f"latency.contexts=[48,{CONTEXT}]",
    "latency.steps=8",
    "latency.warmup=2",
    "seed=5",
]
PERPLEXITY = {
    "nll",
    "ppl",
    "kl",
    "kl_reverse",
    "top1",
    "top5",
    "nll_minus_full",
    "nll_minus_full_worst_decile",
    "worse_share",
    "nll_at",
    "kl_at",
    "engaged",
    "kept_tokens",
    "positions_processed",
}
MEMORY = {
    "held_bytes",
    "dense_bytes",
    "slack_bytes",
    "peak_prefill_bytes",
    "peak_decode_bytes",
    "engaged",
    "kept_tokens",
    "positions_processed",
}
LATENCY = {
    "prefill_ms",
    "ttft_ms",
    "observe_ms",
    "compress_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "tpot_p99_ms",
    "steady",
    "load_average",
    "engaged",
    "kept_tokens",
    "positions_processed",
}


def run(folder: Path, words: list[str]) -> Path:
    """Run the command in `folder` on one thread and return its run folder."""
    with light(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words) == 0
    (made,) = find_runs(folder / "results")
    assert [path.name for path in folder.iterdir()] == ["results"]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield run(tmp_path_factory.mktemp("tiny"), COMMAND)


@pytest.fixture(scope="module")
def frame(folder: Path) -> pd.DataFrame:
    return load(folder)


def pick(frame: pd.DataFrame, method: str, metric: str, measure: str = "perplexity", store: str | None = None) -> float:
    """The one number that fits; the method's plain form unless a store is given."""
    rows = frame[(frame["method"] == method) & (frame["metric"] == metric) & (frame["measure"] == measure)]
    stores = [method, "dense"] if store is None else [store]
    (found,) = rows[rows["store"].isin(stores)]["value"]
    return float(found)


def test_every_method_has_every_number(frame: pd.DataFrame) -> None:
    assert set(frame["method"]) == set(METHODS)
    assert set(frame["status"]) == {"ok"}
    told = frame[~frame["flags"].fillna("").str.contains("not_computed")]  # the note says why there is no number
    assert not told["value"].isna().any()
    assert np.isfinite(told["value"].astype(float)).all()
    for measure, metrics in (("perplexity", PERPLEXITY), ("memory", MEMORY), ("latency", LATENCY)):
        for _, rows in frame[frame["measure"] == measure].groupby(["method", "store"]):
            assert set(rows["metric"]) >= metrics


def test_rows_are_one_number_each_with_all_that_made_it(folder: Path, frame: pd.DataFrame) -> None:
    assert tuple(frame.columns) == COLUMNS == tuple(SCHEMA.names)
    cell = ["method", "store", "knobs", "measure", "metric", "context", "depth", "position", "budget", "bits"]
    assert not frame.duplicated(cell).any()
    for name, value in {
        "run": folder.name,
        "model": "random-tiny",
        "arch": "gqa",
        "kv_heads": 2,
        "converted": False,
        "dataset": "random",
        "dtype": "float32",
        "threads": 1,
        "seed": 5,
        "bos": "none",
    }.items():
        assert set(frame[name]) == {value}, name
    for name in ("revision", "device", "unit", "protocol", "n"):
        assert frame[name].notna().all(), name
    slopes = frame["metric"] == "slope_ms_per_1k"
    assert frame[~slopes]["context"].notna().all()
    assert frame[~slopes]["batch"].notna().all()
    assert slopes.sum() == frame[["method", "store"]].drop_duplicates().shape[0]


def test_knobs_stand_in_the_rows_that_they_made(frame: pd.DataFrame) -> None:
    knobs = frame.drop_duplicates(["method", "store"]).set_index(["method", "store"])

    def row(method: str, store: str, *columns: str) -> list[Any]:
        return [None if pd.isna(knobs.loc[(method, store), c]) else knobs.loc[(method, store), c] for c in columns]

    assert row("full", "dense", "budget", "bits", "group", "residual", "sinks", "variant") == [None] * 6
    assert row("kivi4", "kivi4", "bits", "k_bits", "v_bits", "group", "residual", "budget") == [4, 4, 4, 32, 32, None]
    assert row("kivi2", "kivi2", "bits", "residual") == [2, 32]
    assert row("h2o", "dense", "budget", "variant", "bits") == [40, "sum", None]
    assert row("h2o", "int4", "budget", "variant", "bits", "group") == [40, "sum", 4, 32]
    assert row("streaming_llm", "dense", "budget", "sinks", "variant") == [40, 4, "in_cache"]


def test_numbers_make_sense_together(frame: pd.DataFrame) -> None:
    full = pick(frame, "full", "nll")
    assert full == pytest.approx(np.log(256), abs=0.3)  # random weights: no better than a guess among 256
    assert pick(frame, "recompute", "nll") == pytest.approx(full, abs=1e-5)
    assert pick(frame, "full", "kl") == 0
    assert pick(frame, "kivi8", "kl") < pick(frame, "kivi4", "kl") < pick(frame, "kivi2", "kl")
    assert pick(frame, "full", "kl", store="int8") < pick(frame, "h2o", "kl")
    for method in ("h2o", "streaming_llm", "random"):
        assert pick(frame, method, "kept_tokens") == 40
        assert pick(frame, method, "engaged") == pytest.approx((TOKENS - 1) / TOKENS)
        assert pick(frame, method, "held_bytes", "memory") < pick(frame, "full", "held_bytes", "memory") / 2
    held = [pick(frame, method, "held_bytes", "memory") for method in ("full", "kivi8", "kivi4", "kivi2", "recompute")]
    assert held == sorted(held, reverse=True)
    assert held[-1] == 0


def test_samples_name_every_window_and_method(folder: Path) -> None:
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        names_ = [(method["method"], method["store"]) for method in sample["methods"]]
        assert len(names_) == len(set(names_)) == len(METHODS) + 2
        assert all(np.isfinite([method[key] for key in ("nll", "kl", "top1")]).all() for method in sample["methods"])


def test_the_report_is_built_from_the_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(folder), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    for name in (*METHODS, "h2o+int4"):
        assert name in page
    assert {path.stem for path in (tmp_path / "report").rglob("*.csv")} >= {"perplexity", "memory", "latency"}
    assert list((tmp_path / "report").rglob("*.png"))


# the preset, smaller, on the real model


@pytest.fixture(scope="module")
def first_light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        "experiment=first_light",
        "budget=128",
        "perplexity.context=512",
        "perplexity.tokens=64",
        "perplexity.windows=2",
        "needle.lengths=[512]",
        "needle.samples=1",
        "save_tokens=true",
    ]
    assert cache_folder().is_dir()
    return run(tmp_path_factory.mktemp("first_light"), words)


@pytest.mark.slow
def test_full_is_a_plain_transformers_run(first_light: Path, smollm2: LoadedModel) -> None:
    samples = [json.loads(line) for line in (first_light / "samples.jsonl").read_text().splitlines()]
    windows = [sample for sample in samples if sample["measure"] == "perplexity"]
    plain = [plain_nll(smollm2.model, torch.tensor(sample["ids"]), 512) for sample in windows]
    assert [nll.shape for nll in plain] == [(64,), (64,)]
    assert pick(load(first_light), "full", "nll") == pytest.approx(np.mean(plain), abs=1e-4)


@pytest.mark.slow
def test_methods_are_ordered_as_published(first_light: Path) -> None:
    frame = load(first_light)
    assert set(frame["status"]) == {"ok"}
    kl = {method: pick(frame, method, "kl") for method in frame["method"].unique()}
    assert kl["full"] == 0
    assert 0 < kl["kivi8"] < 1e-4
    assert 1e-3 < kl["kivi4"] < 1e-2
    assert kl["kivi4"] < kl["kivi2"]
    assert pick(frame, "h2o", "nll") < pick(frame, "random", "nll")
    assert abs(pick(frame, "kivi8", "nll_minus_full")) < 0.01
    rates = frame[(frame["metric"] == "hit_rate") & frame["depth"].isna()].set_index("method")["value"]
    assert rates["full"] == rates["kivi8"] == 1
    assert rates["random"] < 1
