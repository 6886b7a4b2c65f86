"""A run: what a cell that fails costs, what an interrupt leaves, what is said, and what tells one run from another."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from rich.console import Console

from kvbench import progress
from kvbench.checks import check_measures_fit, small_prompts
from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.measures import fallbacks as prefills_module
from kvbench.measures.fidelity import Fidelity
from kvbench.measures.latency import Latency
from kvbench.measures.measure import Measure
from kvbench.measures.memory import Memory
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.target import Target
from kvbench.progress import Progress
from kvbench.results.loading import find_runs, load
from kvbench.results.run_files import read_status
from kvbench.texts.tokens import Stretch
from tests.shared.paths import ROOT
from tests.shared.text import light, methods

TINY = ["model=random-tiny", "data=random"]
PERPLEXITY = ["perplexity.context=40", "perplexity.tokens=10"]
LATENCY = ["latency.contexts=[40]", "latency.steps=8", "latency.warmup=2"]
MEMORY = ["memory.contexts=[32]", "memory.tokens=2", "memory.isolate=false"]


def breaks(how: str, at: int) -> str:
    rule = "method.rule._target_=tests.shared.text.Breaks"
    return f"method=random budget=12 {rule} +method.rule.how={how} +method.rule.at={at}"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with light():
        yield tmp_path


def the_run() -> Path:
    (folder,) = find_runs("results")
    return folder


def ok(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["status"] == "ok"]


# failures


@pytest.mark.parametrize("how", ["failed", "oom"])
def test_a_cell_that_fails_is_a_row_and_costs_no_other(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The break lies beyond what memory feeds and within what perplexity and latency do.
    words = ["measure=[perplexity,memory,latency]", *PERPLEXITY, *LATENCY, *MEMORY]
    code = main([*TINY, *words, f'compare=[h2o,"{breaks(how, 45)}",full]', "budget=12"])
    output = capsys.readouterr()
    assert code == 3
    frame = load(the_run())
    bad = frame[frame["status"] != "ok"]
    assert list(bad["status"]) == [how] * 2
    assert list(bad["measure"]) == ["perplexity", "latency"]
    assert set(bad["method"]) == {"random"}
    assert bad["value"].isna().all() and bad["metric"].isna().all()
    assert bad["note"].str.contains("broken at position 45").all()
    done = ok(frame).groupby("measure")["method"].unique().map(set).to_dict()
    assert done == {"perplexity": {"full", "h2o"}, "latency": {"full", "h2o"}, "memory": {"full", "h2o", "random"}}
    status = read_status(the_run())
    assert status["status"] == how
    assert "tests/shared/text.py" in status["error"]  # the traceback
    told = [line for line in output.err.splitlines() if line.startswith("kvbench: ")]
    assert len(told) == 2 and all(f"{how}: random" in line for line in told)
    assert "h2o" in output.out  # the table of what there is


def test_memory_is_measured_in_subprocesses_and_one_that_fails_costs_no_other() -> None:
    words = ["measure=[memory]", "memory.contexts=[32]", "memory.tokens=4"]
    assert main([*TINY, *words, f'compare=[full,"{breaks("failed", 34)}"]', "budget=12"]) == 3
    frame = load(the_run())
    assert dict(zip(frame["method"], frame["status"], strict=True)) == {"full": "ok", "random": "failed"}
    assert "tests/shared/text.py" in read_status(the_run())["error"]
    peaks = frame[frame["metric"].isin(["peak_prefill_bytes", "peak_decode_bytes"])]
    assert len(peaks) == 2 and peaks["note"].str.contains("in a fresh process").all()


def test_a_failure_outweighs_running_out_of_memory() -> None:
    entries = f'compare=["{breaks("oom", 45)}","{breaks("failed", 46)}",full]'
    assert main([*TINY, "measure=[perplexity]", *PERPLEXITY, entries]) == 3
    assert sorted(load(the_run())["status"].unique()) == ["failed", "ok", "oom"]
    assert read_status(the_run())["status"] == "failed"


def test_a_prefill_that_runs_out_of_memory_costs_its_measure_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(prefills_module, "prefill", out_of_memory)
    code = main([*TINY, "measure=[perplexity,memory]", *PERPLEXITY, *MEMORY, "compare=[h2o]", "budget=12"])
    frame = load(the_run())
    assert code == 3
    assert set(frame[frame["measure"] == "perplexity"]["status"]) == {"oom"}
    assert set(frame[frame["measure"] == "perplexity"]["method"]) == {"full", "h2o"}
    assert set(frame[frame["measure"] == "memory"]["status"]) == {"ok"}
    assert read_status(the_run())["status"] == "oom"


# interrupts


def test_an_interrupt_keeps_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure=[memory,latency]", *MEMORY, *LATENCY]
    assert main([*TINY, *words, f'compare=[full,"{breaks("interrupt", 45)}"]']) == 130
    status = read_status(the_run())
    assert status["status"] == "interrupted"
    assert status["finished"] is not None
    frame = load(the_run())
    assert set(ok(frame)["measure"]) == {"memory"}
    assert set(ok(frame)["method"]) == {"full", "random"}
    assert str(the_run().name) in capsys.readouterr().err


def test_sigterm_keeps_what_was_measured(empty_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvbench",
        *TINY,
        "measure=[memory,latency]",
        *MEMORY,
        "latency.contexts=[64]",
        "latency.steps=8000",
        "threads=1",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    )
    try:
        for _ in range(600):
            if list(Path("results").glob("*/metrics.parquet")):
                break
            assert process.poll() is None, "it ended before it could be stopped"
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (130, 143)
    status = read_status(the_run())
    assert status["status"] == "interrupted"
    frame = load(the_run())
    assert set(frame["measure"]) == {"memory"}
    assert "Traceback" not in errors
    assert str(the_run().name) in errors


# what is written and said


def test_the_folder_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure=[perplexity]", *PERPLEXITY, "method=h2o", "budget=12", "save_tokens=true", "seed=3"]
    assert main([*TINY, *words]) == 0
    folder = the_run()
    files = ["config.yaml", "metrics.parquet", "provenance.json", "samples.jsonl", "status.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert [method["name"] for method in config["methods"]] == ["full", "h2o"]
    assert config["perplexity"]["context"] == 40
    assert config["seed"] == 3
    assert read_status(folder)["status"] == "ok"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["window"] for sample in samples] == [0, 1]
    assert all(len(sample["ids"]) == 50 for sample in samples)
    output = capsys.readouterr().out
    assert f"python -m kvbench.report results/{folder.name}" in output
    assert "Perplexity" in output


def test_the_baseline_runs_beside_one_method_and_comes_first() -> None:
    assert main([*TINY, "measure=[perplexity]", *PERPLEXITY, "method=h2o", "budget=12"]) == 0
    assert list(load(the_run())["method"].unique()) == ["full", "h2o"]


def test_a_method_with_a_seed_of_its_own_says_so() -> None:
    entries = 'compare=["method=random budget=12 seed=3","method=random budget=12 seed=4",random]'
    assert main([*TINY, "measure=[perplexity]", *PERPLEXITY, entries, "budget=12", "seed=7"]) == 0
    frame = load(the_run())
    frame = frame[frame["metric"] == "kl"]
    assert list(frame["seed"]) == [7] * 4
    assert [json.loads(knobs).get("seed") for knobs in frame["knobs"].fillna("{}")] == [None, 3, 4, None]
    assert frame["value"].nunique() == 4


def test_a_prompt_that_is_hardly_longer_than_the_budget_draws_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure=[perplexity]", *PERPLEXITY, "compare=[full,h2o+int8,kivi4]", "budget=30"]
    assert main([*TINY, *words]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "h2o+int8 keeps more than half of the prompt" in warnings[0] and "perplexity at 40" in warnings[0]


def test_which_prompts_are_small() -> None:
    settings = [Perplexity(40, 10, 1, 1), Memory([16, 24, 64], 2)]
    assert list(small_prompts(methods("h2o", budget=12), settings)) == [
        "h2o keeps more than half of the prompt, so little is compressed: memory at 16 tokens"
    ]
    assert list(small_prompts(methods("full", "kivi", "recompute"), settings)) == []


def test_threads_are_set_and_stand_in_the_rows() -> None:
    cores = os.cpu_count() or 1
    assert main([*TINY, "measure=[perplexity]", *PERPLEXITY, f"threads={cores}"]) == 0
    assert set(load(the_run())["threads"]) == {cores}


def shown(seconds: list[float], terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a phase of three steps prints while the clock shows `seconds`, the last for whoever looks again."""
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds.pop(0) if len(seconds) > 1 else seconds[0])
    bars = Progress()
    bars.console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with bars.phase("latency 512", 3) as advance:
        for _ in range(3):
            advance()
    bars.say("warning: a line of more than eighty characters " + 60 * "-")
    return bars.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "latency 512" not in shown([0, 0, 1, 2, 3], True, monkeypatch)  # over before it is worth a bar
    slow = shown([0, 0, 6, 12, 18], True, monkeypatch)
    assert "latency 512" in slow and "/3" in slow
    plain = shown([0, 18.04], False, monkeypatch)
    assert plain == f"latency 512: 18.0 s\nwarning: a line of more than eighty characters {60 * '-'}\n"


# lengths


def shape(max_positions: int | None) -> Any:
    return type("Shape", (), {"max_positions": max_positions, "frequency_change": None})


def refusal(measure: Measure, tokens: int, positions: int | None = None) -> str | None:
    text: Any = type("Text", (), {"name": "t"})
    spec: Any = type("Spec", (), {"name": "m", "random": {}})
    try:
        target = Target(spec, shape(positions), text, torch.zeros(tokens), (Stretch("t", 0, tokens),), None, (), 0)
        check_measures_fit([measure], target)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        (Perplexity(40, 10, 1, 1), 50),
        (Memory([20, 40], 4), 44),
        (Latency([20, 40], 28, 2), 70),
        (Latency([20, 40], 8, 2), 61),  # as many are generated
        (Perplexity(40, 10, 1, 1, protocol="chunked"), 50),
    ],
)
def test_exactly_what_is_needed_is_enough(settings: dict[str, Any], needed: int) -> None:
    assert refusal(settings, needed, needed) is None
    assert f"needs {needed} tokens and data=t has {needed - 1}" in (refusal(settings, needed - 1) or "")
    assert f"needs {needed} positions and m has {needed - 1}" in (refusal(settings, needed, needed - 1) or "")
    assert refusal(settings, needed, None) is None


def test_windows_may_overlap_and_may_not_score_a_token_twice() -> None:
    assert refusal(Perplexity(40, 10, 4, 1), 80) is None  # 0, 10, 20, 30: ten new tokens each
    assert "type perplexity.windows=3 or fewer" in (refusal(Perplexity(40, 10, 4, 1), 79) or "")
    assert "type perplexity.windows=1 or fewer" in (refusal(Perplexity(40, 10, 2, 1), 50) or "")


def test_prompts_of_fidelity_are_different_ones() -> None:
    """128 samples of a text that has room for a handful are no 128 samples."""
    assert refusal(Fidelity([40, 20], 10, 4, 1), 70) is None  # prompts begin at 0, 10, 20, 30
    assert "type fidelity.samples=4 or fewer" in (refusal(Fidelity([40], 10, 5, 1), 70) or "")


# the gate


def test_rows_and_terminal_say_how_far_the_full_cache_is_from_the_own_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*TINY, "measure=[perplexity]", *PERPLEXITY]) == 0
    assert "full cache equals the model's forward: max difference" in capsys.readouterr().err
    found = load(the_run())
    assert found["gate"].notna().all() and float(found["gate"].max()) < 5e-4


def test_a_model_that_fails_the_gate_is_refused_or_flagged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise UserError("random-tiny (LlamaForCausalLM): the full cache differs")

    monkeypatch.setattr("kvbench.run.gate", fails)
    words = [*TINY, "measure=[perplexity]", *PERPLEXITY]
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == (
        "kvbench: random-tiny (LlamaForCausalLM): the full cache differs; trust=false measures it and flags every row"
    )
    assert not Path("results").exists() or not find_runs("results")
    assert main([*words, "trust=false"]) == 0
    assert all("untrusted" in flags.split() for flags in load(the_run())["flags"])
