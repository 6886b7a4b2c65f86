"""The scripts for a GPU, tiny and on the CPU: the same code, sizes apart. What they measure here means nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvbench.kernels import REFERENCE
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import read_all
from kvbench.kernels.prefill import Scoring
from scripts import check_graph, gpu_decode, gpu_kernels, gpu_timing
from tests.kernels.test_triton import NoDevice, needs_triton
from tests.shared.paths import ROOT


def rows_of(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[dict[str, Any]]:
    """Run a script's main in this process; the rows that it wrote."""
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["script", "--device", "cpu", "--tiny", "--out", str(out), *words])
    monkeypatch.setenv("KVBENCH_KERNEL", "reference")
    assert script.main() == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "TINY", gpu_kernels.Shape(4, 2, 32, (256,), (2,)))
    rows = rows_of(gpu_kernels, tmp_path, monkeypatch)
    assert [row["contender"] for row in rows] == [
        "ours, bf16",
        "ours, bf16, with probabilities",
        "torch SDPA",
        "torch SDPA, heads as tokens",
        "ours, kivi8",
        "ours, kivi4",
        "ours, kivi2",
        "ours, int4 per token",
    ]
    assert all(row["ms"] > 0 and row["caches"] * row["bytes"] >= 4 * 2**20 for row in rows)
    read = {row["contender"]: row["bytes"] for row in rows}
    assert read["ours, bf16"] == read["torch SDPA"] == 2 * 2 * 2 * 256 * 32 * 2
    # 128 rows in codes, with a float16 pair each 32 of them, and 128 rows in 16 bits
    assert read["ours, kivi4"] == 2 * (2 * 2 * 128 * 32 * 5 // 8) + 2 * (2 * 2 * 128 * 32 * 2)


def test_contenders_attend_over_what_they_say() -> None:
    """The whole buffers with their lengths are the caches that they stand for, to the last row."""
    shape, cpu = gpu_kernels.TINY, torch.device("cpu")
    query = torch.randn(2, 4, 1, 32, dtype=torch.bfloat16)
    for keys, values, lengths in (
        gpu_kernels.dense(shape, 2, 256, cpu),
        gpu_kernels.kivi(4, shape, 2, 256, cpu),
        gpu_kernels.per_token(4, shape, 2, 256, cpu),
    ):
        got, probabilities = REFERENCE.attend(query, keys, values, Scoring(1.0), AttendOptions(lengths=lengths))
        key, value = (read_all(side, torch.float32).repeat_interleave(2, 1) for side in (keys, values))
        want = torch.softmax(query.float() @ key.mT, -1) @ value
        assert probabilities is not None and probabilities.shape[-1] == 256
        torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=1e-2)


def test_faster_than_the_memory_fails() -> None:
    from rich.console import Console

    row: dict[str, object] = {"contender": "ours, bf16", "batch": 1, "context": 65536, "ms": 1.0, "of_read": 0.99}
    quiet = Console(quiet=True)
    assert gpu_kernels.verdicts([row], quiet)
    assert not gpu_kernels.verdicts([row, row | {"contender": "ours, kivi4", "of_read": 1.001}], quiet)


def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(gpu_decode, tmp_path, monkeypatch)
    assert [row["entry"] for row in rows] == [cell.entry for cell in gpu_decode.TINY_PLAN.cells]
    assert not [row["error"] for row in rows if "error" in row]
    held = {row["entry"]: row["cache_bytes"] for row in rows if row["batch"] == 2}
    assert held["kivi2"] < held["kivi4"] < held["full"] and held["streaming_llm"] < held["h2o"] < held["full"]
    assert held["StaticCache"] == 2 * 2 * 2 * 2 * 256 * 32 * 4
    assert 1 < held["full"] / held["StaticCache"] < 1.01  # positions


def test_a_cell_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (gpu_decode.Cell(1, 64, "nothing"), gpu_decode.Cell(1, 64, "full"))
    monkeypatch.setattr(gpu_decode, "TINY_PLAN", gpu_decode.Plan(cells, 64, 2))
    monkeypatch.setattr(gpu_decode, "method_of", lambda entry, budget: {"full": FULL}[entry])
    broken, whole = rows_of(gpu_decode, tmp_path, monkeypatch)
    assert "KeyError" in broken["error"] and whole["tpot_p50_ms"] > 0


FULL = gpu_decode.method_of("full", 64)


def test_check_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of(check_graph, tmp_path, monkeypatch, "--only", "h2o+int4") == [{"method": "h2o+int4", "wrong": ""}]


def test_check_graph_sees_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that does not count what it gave up turns StreamingLLM's sinks by too little."""
    monkeypatch.setattr("kvbench.cache.counters.DeviceCounters.evict", lambda counters: None)
    out = tmp_path / "rows.json"
    words = ["script", "--device", "cpu", "--only", "streaming_llm+rot4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("KVBENCH_KERNEL", "reference")
    assert check_graph.main() == 1
    assert "apart at step" in json.loads(out.read_text())["rows"][0]["wrong"]


@needs_triton
@pytest.mark.parametrize("length", [2**20, 2**32])
def test_the_reader_reads_16_bytes_at_a_time(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for Hopper: what the memory's speed is measured with."""
    from triton.runtime import driver

    from scripts.gpu_read import read

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDevice())
    memory = torch.zeros(16)
    made = read.warmup(memory, memory, length, BLOCK=4096, grid=(1,), num_warps=8)
    ptx = (made.result() if hasattr(made, "result") else made).asm["ptx"]
    assert "ld.global.v4" in ptx or re.search(r"cp\.async\.c[ag]\.shared\.global [^;]*, (16|0x10)", ptx)
    assert not re.search(r"ld\.global\.b32", ptx)


def test_without_a_gpu_the_scripts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu --tiny"):
        gpu_timing.device_of(gpu_timing.parser("").parse_args([]))


@pytest.mark.slow
def test_dry_run_of_the_whole(tmp_path: Path) -> None:
    """The Triton kernels cannot be checked here, so that is the stage that fails, and costs no other."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "scripts/gpu_reference.sh", "--dry-run"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
        summary = next(member for member in packed.getmembers() if member.name.endswith("summary.txt"))
        text = packed.extractfile(summary).read().decode()  # type: ignore[union-attr]
    assert {"check_graph.json", "kernels.json", "decode.json", "metrics.parquet", "check_triton.log"} <= names
    assert "THE TRITON KERNELS DID NOT PASS: everything below runs on the reference kernel" in text
    for stage in ("machine", "check_graph", "kernels", "decode", "quality"):
        assert f"{stage}: done in" in text


@pytest.mark.parametrize("word, said", [("--quick", "--dry-run"), ("nowhere", "no folder nowhere")])
def test_what_gpu_reference_cannot_use(word: str, said: str) -> None:
    done = subprocess.run(["bash", "scripts/gpu_reference.sh", word], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
