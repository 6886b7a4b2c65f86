"""Prompt attention and its sums by blocks, against the whole matrix."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels import prefill
from kvbench.kernels.prefill import Scoring, causal_attention, column_sums, last_queries, probability_blocks
from tests.shared.paths import ROOT
from tests.shared.reference import attention_matrix, attention_output, causal_mask, per_kv_head

LAYOUTS = pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=["gqa", "mha", "mqa"])
SCORINGS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 5},
    "sinks": {"sink_logits": True},
    "all": {"softcap": 1.5, "window": 9, "sink_logits": True},
}


def draw(
    heads: tuple[int, int], length: int, dim: int = 8, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, D + 3]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads[0], dim), (heads[1], dim), (heads[1], dim + 3)
    query, key, value = (torch.randn(batch, h, length, d, generator=generator, dtype=torch.float64) for h, d in shapes)
    return (2 * query).to(dtype), key.to(dtype), value.to(dtype)


def scoring_of(name: str, heads: int, scaling: float = 0.3) -> Scoring:
    knobs = dict(SCORINGS[name])
    if knobs.get("sink_logits"):
        knobs["sink_logits"] = torch.linspace(-1, 2, heads, dtype=torch.float64)
    return Scoring(scaling, **knobs)


def whole_matrix(query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
    mask = causal_mask(key.shape[2], scoring.window)
    return attention_matrix(query, key, mask, scoring.scaling, scoring.softcap, scoring.sink_logits)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the usual block size, and with blocks of the smallest height (16 rows)."""
    if request.param == "many blocks":
        monkeypatch.setattr(prefill, "BLOCK_BYTES", 1)
    return request.param


@LAYOUTS
@pytest.mark.parametrize("scoring_name", SCORINGS)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
def test_sums_and_output_equal_the_whole_matrix(
    heads: tuple[int, int], scoring_name: str, length: int, blocks: str
) -> None:
    query, key, value = draw(heads, length)
    scoring = scoring_of(scoring_name, heads[0])
    matrix = whole_matrix(query, key, scoring)
    for combine in ("sum", "mean", "max"):
        got = column_sums(query, key, scoring, combine)
        assert got.dtype == torch.float32
        want = per_kv_head(matrix, heads[1], combine).sum(2)
        torch.testing.assert_close(got, want.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        causal_attention(query, key, value, scoring), attention_output(matrix, value), atol=1e-12, rtol=0
    )
    for count in (1, 7, 32):
        got = last_queries(query, key, scoring, count)
        rows = min(count, length)
        want = matrix[:, :, length - rows :].unflatten(1, (heads[1], -1)).float()
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 70),
    st.sampled_from([None, 1, 3, 40]),
    st.sampled_from([None, 0.7]),
    st.booleans(),
    st.sampled_from(["sum", "mean", "max"]),
)
def test_sums_of_any_shape(
    batch: int,
    kv_heads: int,
    group: int,
    length: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    combine: str,
) -> None:
    heads = (kv_heads * group, kv_heads)
    query, key, value = draw(heads, length, dim=4, batch=batch, seed=length)
    sink_logits = torch.linspace(-2, 1, heads[0], dtype=torch.float64) if sinks else None
    scoring = Scoring(0.5, softcap, window, sink_logits)
    matrix = whole_matrix(query, key, scoring)
    want = per_kv_head(matrix, kv_heads, combine).sum(2).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "BLOCK_BYTES", 1)
        torch.testing.assert_close(column_sums(query, key, scoring, combine), want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            causal_attention(query, key, value, scoring), attention_output(matrix, value), atol=1e-11, rtol=0
        )


def test_blocks_cover_every_row_once_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block of the score matrix is larger than the limit, where that allows the smallest height."""
    query, key, _ = draw((6, 2), 200)
    monkeypatch.setattr(prefill, "BLOCK_BYTES", 2 * 6 * 200 * 8 * 40)
    seen: list[int] = []
    for rows, columns, probabilities in probability_blocks(query, key, Scoring(0.3)):
        seen += range(rows.start, rows.stop)
        assert probabilities.numel() * 8 <= prefill.BLOCK_BYTES
        assert columns.stop == rows.stop
    assert seen == list(range(200))


@LAYOUTS
def test_every_query_gives_out_exactly_one(heads: tuple[int, int]) -> None:
    """Sums over all columns: the number of queries times the heads that share them."""
    query, key, _ = draw(heads, 40)
    sums = column_sums(query, key, Scoring(0.3), "sum")
    torch.testing.assert_close(sums.sum(-1), torch.full((2, heads[1]), 40.0 * heads[0] / heads[1]))


def test_later_tokens_do_not_change_what_earlier_queries_give() -> None:
    """No leak from the future: whatever follows, the first 30 queries give the first 30 tokens the same."""
    query, key, _ = draw((6, 2), 50)
    other_query, other_key, _ = draw((6, 2), 50, seed=1)
    for x, other in ((query, other_query), (key, other_key)):
        other[:, :, :30] = x[:, :, :30]
    scoring = Scoring(0.3)
    alone = column_sums(query[:, :, :30], key[:, :, :30], scoring)
    for q, k in ((query, key), (other_query, other_key)):
        after = last_queries(q, k, scoring, 20).double().sum((2, 3))
        whole = column_sums(q, k, scoring)
        torch.testing.assert_close(whole[..., :30] - after[..., :30].float(), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_summed_in_float32(dtype: torch.dtype) -> None:
    """The scores of bfloat16 queries and keys, computed from their exact values."""
    query, key, _ = draw((4, 2), 60, dtype=dtype)
    want = per_kv_head(whole_matrix(query.double(), key.double(), Scoring(0.3)), 2, "sum").sum(2)
    torch.testing.assert_close(column_sums(query, key, Scoring(0.3)), want.float(), atol=1e-4, rtol=0)


PEAK = """
import re, sys, torch
from pathlib import Path
from kvbench.cache.build import prefill
from kvbench.methods.h2o import H2O
from tests.shared.models import random_llama

model, rules = random_llama(9, 3, 64, layers=4, dtype=torch.float32), [H2O(256)] if sys.argv[1] == "h2o" else []
prefill(model, torch.zeros(1, 64, dtype=torch.int64), [H2O(64)])
memory = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
prefill(model, torch.zeros(1, 8192, dtype=torch.int64), rules)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak")
def test_peak_with_observations_at_8k_tokens() -> None:
    """What a prefill takes beyond the model's weights grows by at most a fifth."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(ROOT)}
    peaks = {}
    for rule in ("none", "h2o"):
        done = subprocess.run([sys.executable, "-c", PEAK, rule], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks[rule] = int(done.stdout)
    assert peaks["h2o"] <= 1.2 * peaks["none"], peaks
