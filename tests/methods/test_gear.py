"""GEAR's store against a loop over blocks, lines and numbers, its plain codes, its error by rank, its bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.cache.bytes import held_bytes
from kvbench.cache.store import SlotShape
from kvbench.errors import UserError
from kvbench.kernels import choose
from kvbench.kernels.parts import Packed, read_all
from kvbench.methods.gear import Gear
from tests.shared.reference import along_channels, along_tokens

CPU = torch.device("cpu")
BLOCK, GROUP, D, DV = 32, 16, 32, 48


def rows(tokens: int, dim: int, seed: int = 0) -> Tensor:
    """Channels of unequal size with means of their own, and one token far outside."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 2, tokens, dim, generator=draw) * torch.linspace(0.2, 2, dim)
    drawn += 3 * torch.randn(2, 2, 1, dim, generator=draw)
    drawn[:, :, 5] *= 10
    return drawn


def slots_of(store: Gear, tokens: int, step: int = 1):  # type: ignore[no-untyped-def]
    return store.allocate(SlotShape(2, 2, D, DV, tokens, step, torch.float32, CPU))


def slow_block(block: np.ndarray, bits: int, rank: int, outliers: float, by_channel: bool) -> np.ndarray:
    """One block [n, d] of one head as it is read; by_channel: groups and outliers along tokens of a channel."""
    lines = (block.T if by_channel else block).copy()
    count, places = int(outliers * lines.shape[1] / 2), []
    for line in lines:
        order = sorted(range(len(line)), key=lambda i, line=line: (line[i], i))
        picked = order[:count] + order[len(order) - count :]
        line[picked] = line.mean(dtype=np.float64)
        places.append(picked)
    calm = torch.from_numpy(lines)[None, None]
    codes = along_channels(calm, bits, GROUP)[0, 0].numpy()  # groups along a line, whichever it is
    missed = lines.astype(np.float64) - codes
    u, s, vh = np.linalg.svd(missed, full_matrices=False)
    read = codes + (u[:, :rank] * s[:rank]) @ vh[:rank]
    whole = block.T if by_channel else block
    for i, picked in enumerate(places):
        read[i, picked] = whole[i, picked]
    return read.T if by_channel else read


@pytest.mark.parametrize(("k_bits", "v_bits"), [(4, 4), (2, 8)])
@pytest.mark.parametrize(("rank", "outliers"), [(0, 0.0), (4, 0.0), (0, 0.1), (3, 0.1)])
def test_rows_that_are_read_are_those_of_the_definition(k_bits: int, v_bits: int, rank: int, outliers: float) -> None:
    """A prompt of two blocks and a rest, and steps of 3 that fill two more. Float16 directions: a part in 1,000."""
    total = 4 * BLOCK + 7
    key, value = rows(total, D), rows(total, DV, 1)
    slots = slots_of(Gear(k_bits, v_bits, GROUP, BLOCK, rank, outliers), total, 3)
    at = 2 * BLOCK + 5
    slots.fill(key[:, :, :at], value[:, :, :at])
    while at < total:
        q = min(3, total - at)
        slots.append(key[:, :, at : at + q], value[:, :, at : at + q])
        at += q
        slots.settle()
        whole = at // BLOCK * BLOCK
        assert slots.keys.groups.length == slots.values.groups.length == whole
    for parts, exact, bits, by_channel in (
        (slots.key_parts(), key, k_bits, True),
        (slots.value_parts(), value, v_bits, False),
    ):
        got = read_all(parts, torch.float64)
        assert torch.equal(got[:, :, 4 * BLOCK :], exact[:, :, 4 * BLOCK :].double())
        for b, h, i in np.ndindex(2, 2, 4):
            at = slice(i * BLOCK, (i + 1) * BLOCK)
            want = slow_block(exact[b, h, at].numpy(), bits, rank, outliers, by_channel)
            # A number whose code would round the other way in float64 is off by a step: none of the drawn ones is.
            assert np.abs(got[b, h, at].numpy() - want).max() < 4e-3 * np.abs(want).max()


def test_a_prompt_in_pieces_is_held_as_in_one() -> None:
    key, value = rows(3 * BLOCK + 9, D), rows(3 * BLOCK + 9, DV, 1)
    whole, pieces = (slots_of(Gear(4, 4, GROUP, BLOCK, 2, 0.1), 3 * BLOCK + 9) for _ in "ab")
    whole.fill(key, value)
    for start, stop in ((0, 7), (7, 2 * BLOCK + 3), (2 * BLOCK + 3, 3 * BLOCK + 9)):
        pieces.fill(key[:, :, start:stop], value[:, :, start:stop])
        pieces.settle()
    assert pieces.length == whole.length == 3 * BLOCK + 9
    for ours, theirs in ((pieces.key_parts(), whole.key_parts()), (pieces.value_parts(), whole.value_parts())):
        torch.testing.assert_close(read_all(ours, torch.float32), read_all(theirs, torch.float32), atol=1e-3, rtol=0)


def test_without_directions_and_outliers_only_plain_codes_are_left() -> None:
    """KIVI's codes on both axes, which the compiled kernel reads; it says why it does not read the others."""
    key, value = rows(2 * BLOCK, D), rows(2 * BLOCK, DV, 1)
    slots = slots_of(Gear(4, 2, GROUP, BLOCK, 0, 0.0), 2 * BLOCK)
    slots.fill(key, value)
    assert all(isinstance(part, Packed) for part in (*slots.key_parts(), *slots.value_parts()))
    torch.testing.assert_close(
        read_all(slots.key_parts(), torch.float64), along_tokens(key, 4, GROUP), atol=1e-9, rtol=0
    )
    want = along_channels(value, 2, GROUP)
    torch.testing.assert_close(read_all(slots.value_parts(), torch.float64), want, atol=1e-9, rtol=0)
    kernel, query = choose(CPU, torch.float32, "cpu"), torch.zeros(2, 2, 1, D)
    assert kernel.refusal(query, slots.key_parts(), slots.value_parts()) is None
    for rank, outliers in ((1, 0.0), (0, 0.1)):
        other = slots_of(Gear(4, 2, GROUP, BLOCK, rank, outliers), 2 * BLOCK)
        other.fill(key, value)
        reason = kernel.refusal(query, other.key_parts(), other.value_parts())
        assert reason == "the compiled kernel does not read rows that are a sum of several parts"


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_the_error_falls_with_the_rank_and_with_outliers(outliers: float) -> None:
    key, value = rows(4 * BLOCK, D), rows(4 * BLOCK, DV, 1)

    def error(rank: int, share: float) -> list[float]:
        slots = slots_of(Gear(2, 2, GROUP, BLOCK, rank, share), 4 * BLOCK)
        slots.fill(key, value)
        pairs = (slots.key_parts(), key), (slots.value_parts(), value)
        return [float((read_all(parts, torch.float32) - exact).square().mean()) for parts, exact in pairs]

    by_rank = [error(rank, outliers) for rank in (0, 1, 2, 4, 8, 16, 32)]
    for side in (0, 1):
        falling = [errors[side] for errors in by_rank]
        assert all(after < before for before, after in pairwise(falling))
        assert falling[-1] < 0.01 * falling[0] or side == 1  # keys: all 32 directions of 32 channels
        assert error(0, 0.1)[side] < error(0, 0.0)[side]


@pytest.mark.parametrize(("rank", "outliers"), [(0, 0.0), (4, 0.0), (0, 0.1), (4, 0.1), (2, 0.02)])
def test_bytes_by_hand(rank: int, outliers: float) -> None:
    store, tokens = Gear(4, 2, GROUP, BLOCK, rank, outliers), 5 * BLOCK + 3
    held = held_bytes(slots_of(store, tokens).buffers(tokens))
    blocks = 5
    codes = blocks * BLOCK * (D * (4 / 8 + 4 / GROUP) + DV * (2 / 8 + 4 / GROUP))
    low_rank = blocks * rank * 2 * ((BLOCK + D) + (BLOCK + DV))
    apart = blocks * 4 * (D * 2 * int(outliers * BLOCK / 2) + BLOCK * 2 * int(outliers * DV / 2))
    residual = (BLOCK + 1) * (D + DV) * 4
    assert held.held == 2 * 2 * (codes + low_rank + apart + residual)
    assert store.planned_bytes(SlotShape(2, 2, D, DV, tokens, 1, torch.float32, CPU)) == held.held


def test_settings_that_cannot_be_held() -> None:
    with pytest.raises(UserError, match="residual=48 is not a multiple of group=32; type residual=128"):
        Gear(residual_length=48)
    with pytest.raises(UserError, match="factors=-1 for gear"):
        Gear(factors=-1)
    with pytest.raises(UserError, match="outliers=1 for gear; type a share from 0 on and below 1"):
        Gear(outliers=1)
    with pytest.raises(UserError, match="factors=40 for gear with 32 channels or tokens; type factors=32 or less"):
        Gear(factors=40).check(32, 64)
