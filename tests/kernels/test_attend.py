"""Decode attention over parts, against a plain softmax over the rows they hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.cache.groups import Groups
from kvbench.cache.store import SlotShape
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Dense, Part, read_all
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.reference import attend
from tests.shared.reference import along_channels, along_tokens, attention_matrix, attention_output

LAYOUTS = pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=["gqa", "mha", "mqa"])
LENGTH, DIM = 48, 16


def draw(heads: tuple[int, int], q: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """query [2, Hq, q, 16], key [2, Hkv, 48, 16], value [2, Hkv, 48, 24]."""
    generator = torch.Generator().manual_seed(q)
    shapes = (heads[0], q, DIM), (heads[1], LENGTH, DIM), (heads[1], LENGTH, 24)
    drawn = [torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return drawn[0], drawn[1], drawn[2]


def packed(rows: Tensor, axis: str, bits: int = 4, group: int = 8) -> tuple[list[Part], Tensor]:
    """Rows as one packed part, and what the reference says they read back as."""
    batch, heads, n, width = rows.shape
    shape = SlotShape(batch, heads, width, width, n, 1, rows.dtype, rows.device)
    groups = Groups(axis, bits, group, n, width, shape)
    groups.append(rows)
    return list(groups.parts()), (along_tokens if axis == "token" else along_channels)(rows, bits, group)


def splits(rows: Tensor, kind: str) -> tuple[list[Part], Tensor]:
    """The rows cut into parts in one of several ways, and what they read back as."""
    if kind == "one":
        return [Dense(rows)], rows
    if kind == "ragged":
        return [Dense(rows[:, :, a:b]) for a, b in ((0, 1), (1, 20), (20, 48))], rows
    if kind == "kivi keys":
        head, read = packed(rows[:, :, :40], "token")
        return [*head, Dense(rows[:, :, 40:])], torch.cat([read, rows[:, :, 40:]], dim=2)
    head, read = packed(rows[:, :, :29], "channel", bits=2)
    rest = [Dense(rows[:, :, 29:30]), Dense(rows[:, :, 30:])]
    return [*head, *rest], torch.cat([read, rows[:, :, 29:]], dim=2)


def check(got: tuple[Tensor, Tensor], want: Tensor, value: Tensor) -> None:
    """Output and probabilities [B, Hkv, Hq / Hkv, q, S] against a probability matrix [B, Hq, q, S]."""
    torch.testing.assert_close(got[1].flatten(1, 2), want, atol=1e-12, rtol=0)
    torch.testing.assert_close(got[0], attention_output(want, value), atol=1e-12, rtol=0)


@LAYOUTS
@pytest.mark.parametrize("q", [1, 2, 7])
@pytest.mark.parametrize("cuts", [("one", "one"), ("ragged", "one"), ("kivi keys", "kivi values"), ("one", "ragged")])
def test_every_slot_visible(heads: tuple[int, int], q: int, cuts: tuple[str, str]) -> None:
    query, key, value = draw(heads, q)
    (keys, key), (values, value) = splits(key, cuts[0]), splits(value, cuts[1])
    got = attend(query, keys, values, Scoring(0.4))
    assert got[1].shape == (2, heads[1], heads[0] // heads[1], q, LENGTH)
    check(got, attention_matrix(query, key, torch.ones(q, LENGTH, dtype=torch.bool), 0.4), value)


@LAYOUTS
@pytest.mark.parametrize("q", [1, 5])
def test_masks_of_each_head(heads: tuple[int, int], q: int) -> None:
    """Each batch row, KV head and query sees its own slots; an unseen slot gets exactly nothing."""
    query, key, value = draw(heads, q)
    visible = torch.rand(2, heads[1], q, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.3
    visible[..., 7] = True
    got = attend(query, [Dense(key)], [Dense(value)], Scoring(0.4), AttendOptions(visible))
    by_query_head = visible.repeat_interleave(heads[0] // heads[1], dim=1)
    check(got, attention_matrix(query, key, by_query_head, 0.4), value)
    assert got[1].flatten(1, 2)[~by_query_head].eq(0).all()


@LAYOUTS
def test_softcap_and_learned_sinks(heads: tuple[int, int]) -> None:
    query, key, value = draw(heads, 3)
    sinks = torch.linspace(-1, 3, heads[0], dtype=torch.float64)
    everything = torch.ones(3, LENGTH, dtype=torch.bool)
    for softcap, sink_logits in ((1.3, None), (None, sinks), (1.3, sinks)):
        scoring = Scoring(0.8, softcap, None, sink_logits)
        got = attend(query, [Dense(key)], [Dense(value)], scoring)
        check(got, attention_matrix(query, key, everything, 0.8, softcap, sink_logits), value)
    assert got[1].sum(-1).max() < 1  # the sinks took their share


@LAYOUTS
@pytest.mark.parametrize("n_sink", [1, 4, 21])
@pytest.mark.parametrize("cut", ["one", "ragged", "kivi keys"])
def test_another_query_for_the_sinks(heads: tuple[int, int], n_sink: int, cut: str) -> None:
    """The first n_sink slots are scored by `sink_query`, the others by `query`, in one softmax."""
    query, key, value = draw(heads, 2)
    sink_query = draw(heads, 2)[0].flip(-1)
    keys, key = splits(key, cut)
    got = attend(query, keys, [Dense(value)], Scoring(0.4), AttendOptions(sink_query=sink_query, n_sink=n_sink))
    doubled = torch.cat([query, sink_query], dim=-1)
    none = torch.zeros_like(key)
    sink_keys, other_keys = torch.cat([none, key], dim=-1), torch.cat([key, none], dim=-1)
    joined = torch.cat([sink_keys[:, :, :n_sink], other_keys[:, :, n_sink:]], dim=2)
    check(got, attention_matrix(doubled, joined, torch.ones(2, LENGTH, dtype=torch.bool), 0.4), value)


def test_slot_order_does_not_matter() -> None:
    query, key, value = draw((6, 2), 1)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    here = attend(query, [Dense(key)], [Dense(value)], Scoring(0.4))[0]
    there = attend(query, [Dense(key[:, :, order])], [Dense(value[:, :, order])], Scoring(0.4))[0]
    torch.testing.assert_close(here, there, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_compute_in_float32(dtype: torch.dtype) -> None:
    """Output in the query's dtype, probabilities in float32, right to their own precision."""
    query, key, value = draw((6, 2), 2, dtype)
    output, probabilities = attend(query, [Dense(key)], [Dense(value)], Scoring(0.4))
    assert (output.dtype, probabilities.dtype) == (dtype, torch.float32)
    want = attention_matrix(query.double(), key.double(), torch.ones(2, LENGTH, dtype=torch.bool), 0.4)
    torch.testing.assert_close(probabilities.flatten(1, 2).double(), want, atol=1e-6, rtol=0)
    close = attention_output(want, value.double()).to(dtype)
    torch.testing.assert_close(output, close, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0)


def test_no_slot_at_all_is_an_error() -> None:
    query, key, _ = draw((4, 2), 1)
    with pytest.raises(ValueError, match="without a single slot"):
        attend(query, [Dense(key[:, :, :0])], [], Scoring(1.0))
    assert read_all([Dense(key), Dense(key)], torch.float32).shape[2] == 2 * LENGTH
