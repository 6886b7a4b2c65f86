"""Attention over blocks of a pool: compiled kernel and reference against each head's own rows, by themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels import compiled, reference
from kvbench.kernels.cpu import CpuKernel
from kvbench.kernels.cpu_parts import pack_parts
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Coded, Dense, Packed, Paged
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.quantise import pack, quantise
from kvbench.kernels.triton_decode import refusal

BLOCK = 16


@pytest.fixture(scope="module")
def kernel() -> CpuKernel:
    found = compiled()
    assert isinstance(found, CpuKernel), found
    return found


LEVELS = torch.linspace(-2, 2, 16)


def held(rows: Tensor, kind: str) -> Coded | Dense | Packed:
    """Rows [b, h, n, D] as a part: a float dtype, codes of so many bits, or codes of a codebook."""
    if kind == "coded":
        norm = rows.abs().amax(-1).clamp(max=6e4) / 2
        codes = ((rows / norm.unsqueeze(-1)).unsqueeze(-1) - LEVELS).abs().argmin(-1).to(torch.uint8)
        return Coded(pack(codes.unflatten(-1, (-1, 32)), 4), norm.to(torch.float16), LEVELS, 4, 32)
    if kind == "float8_e4m3fn":
        return Dense(rows.clamp(-448, 448).to(torch.float8_e4m3fn))
    if not kind.isdigit():
        return Dense(rows.to(getattr(torch, kind)))
    codes, scale, minimum = quantise(rows.unflatten(-1, (-1, 32)), int(kind))
    return Packed(pack(codes, int(kind)), scale, minimum, int(kind), 32, "channel")


def paged(rows: list[list[Tensor]], kind: str, per_head: bool, scattered: bool, generator: torch.Generator) -> Paged:
    """rows[b][h], [n, D] each: into blocks of one pool, for every head its own (per_head) or for a row's heads alike.

    What a head does not have lies in blocks of another, or is garbage.
    """
    batch, heads, width = len(rows), len(rows[0]), rows[0][0].shape[1]
    lengths = torch.tensor([[len(head) for head in row] for row in rows])
    longest = int(lengths.max())
    each = -(-longest // BLOCK)
    tables = heads if per_head else 1
    order = torch.randperm(batch * tables * each, generator=generator) if scattered else torch.arange(999)
    table = order[: batch * tables * each].view(batch, tables, each).to(torch.int32)
    pool = torch.full((1, 1 if per_head else heads, batch * tables * each * BLOCK, width), 7e3)
    for b, row in enumerate(rows):
        for h, head in enumerate(row):
            for slot, token in enumerate(head):
                block = int(table[b, h if per_head else 0, slot // BLOCK])
                pool[0, 0 if per_head else h, block * BLOCK + slot % BLOCK] = token
    even = bool((lengths == longest).all())
    return Paged(held(pool, kind), table, None if even else lengths, longest, BLOCK)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3]),
    tokens=st.sampled_from([1, 1, 3]),
    longest=st.sampled_from([1, 15, 16, 17, 100, 530]),
    even=st.booleans(),
    kind=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "8", "4", "3", "2", "coded"]),
    per_head=st.booleans(),
    scattered=st.booleans(),
    n_sink=st.sampled_from([0, 0, 20]),
    masked=st.booleans(),
    logits=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_tables(
    kernel: CpuKernel,
    batch: int,
    heads: int,
    group: int,
    tokens: int,
    longest: int,
    even: bool,
    kind: str,
    per_head: bool,
    scattered: bool,
    n_sink: int,
    masked: bool,
    logits: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dim = 64
    count = [
        [
            longest if even or h == 0 else int(torch.randint(1, longest + 1, (), generator=generator))
            for h in range(heads)
        ]
        for _ in range(batch)
    ]
    keys, values = ([[torch.randn(n, dim, generator=generator) for n in row] for row in count] for _ in range(2))
    query, sink_query = torch.randn(2, batch, heads * group, tokens, dim, generator=generator)
    visible = None
    if masked:
        visible = torch.rand(batch, heads, tokens, longest, generator=generator) < 0.7
        visible[..., 0] = True
    sinks = torch.randn(heads * group, generator=generator) if logits else None
    parts = [[paged(side, kind, per_head, scattered, generator)] for side in (keys, values)]
    scoring = Scoring(0.125, sink_logits=sinks)
    n_sink = min(n_sink, longest)
    options = AttendOptions(visible, sink_query if n_sink else None, n_sink)
    assert pack_parts(query, *parts) is not None
    for attend in (kernel.attend, reference.attend):
        output, probabilities = attend(query, *parts, scoring, options)
        assert probabilities is not None
        for b, row in enumerate(count):
            for h, n in enumerate(row):
                mine = slice(h * group, (h + 1) * group)
                alone = Scoring(0.125, sink_logits=None if sinks is None else sinks[mine])
                want, weights = reference.attend(
                    query[b : b + 1, mine].double(),
                    [held(keys[b][h][None, None], kind)],
                    [held(values[b][h][None, None], kind)],
                    alone,
                    AttendOptions(
                        None if visible is None else visible[b : b + 1, h : h + 1, :, :n],
                        sink_query[b : b + 1, mine].double() if n_sink else None,
                        min(n_sink, n),
                    ),
                )
                assert torch.allclose(output[b, mine].double(), want[0], atol=2e-5)
                assert torch.allclose(probabilities[b, h, ..., :n].double(), weights[0, 0], atol=1e-5)
                assert not probabilities[b, h, ..., n:].any()


def test_threads_share_a_ragged_pool(kernel: CpuKernel) -> None:
    """Long and short heads on several threads: the ranges that a short head does not have are nobody's."""
    generator = torch.Generator().manual_seed(3)
    rows = [[torch.randn(n, 64, generator=generator) for n in (3000, 5)]]
    part = [paged(rows, "float32", True, True, generator)]
    query = torch.randn(1, 4, 1, 64, generator=generator)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for got, want in zip(
                kernel.attend(query, part, part, Scoring(0.125)),
                reference.attend(query, part, part, Scoring(0.125)),
                strict=True,
            ):
                assert got is not None and torch.allclose(got, want, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_triton_says_that_it_does_not_take_blocks() -> None:
    part = [paged([[torch.ones(20, 64)]], "float32", True, False, torch.Generator())]
    assert refusal(torch.ones(1, 1, 1, 64), part, part) == "blocks of a pool"
