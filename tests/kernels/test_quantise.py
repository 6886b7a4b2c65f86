"""Group quantisation: its error bound, its codes, its packing, and which axis a group should run along."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.cache.groups import Groups
from kvbench.cache.store import SlotShape
from kvbench.kernels import compiled
from kvbench.kernels.cpu import CpuKernel
from kvbench.kernels.parts import Axis, Dense, Packed, Part, read_all, total_length
from kvbench.kernels.quantise import dequantise, pack, quantise, unpack
from tests.shared.reference import along_channels, along_tokens

BITS = pytest.mark.parametrize("bits", [8, 4, 2])


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def empty(rows: Tensor, axis: Axis, bits: int, group: int) -> Groups:
    """Room for the rows [B, H, n, D]."""
    batch, heads, n, width = rows.shape
    shape = SlotShape(batch, heads, width, width, n, 1, rows.dtype, rows.device)
    return Groups(axis, bits, group, n, width, shape)


def held(rows: Tensor, axis: Axis, bits: int, group: int) -> Groups:
    """The rows [B, H, n, D] as codes."""
    groups = empty(rows, axis, bits, group)
    groups.append(rows)
    return groups


def within_bound(x: Tensor, bits: int) -> None:
    """|x - back| <= s/2 + |mn_stored - mn| + (2^b - 1) |s_stored - s|, element by element in float64.

    A ten-thousandth of the bound and a float32 ulp of the group's largest number are allowed on top, for the
    codes are computed in float32.
    """
    codes, scale, minimum = quantise(x, bits)
    back = dequantise(codes, scale, minimum, torch.float64)
    exact, levels = x.double(), 2**bits - 1
    low = exact.amin(-1)
    wanted_scale = (exact.amax(-1) - low) / levels
    bound = wanted_scale / 2 + (minimum.double() - low).abs() + levels * (scale.double() - wanted_scale).abs()
    slack = 1e-4 * bound + exact.abs().amax(-1) * 2**-23
    assert back.isfinite().all()
    assert ((back - exact).abs() <= (bound + slack).unsqueeze(-1)).all()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_the_compiled_encoder_gives_the_same_bits(bits: int, axis: Axis) -> None:
    """From ranges that float16 has no scale for to those beyond it, constant groups, infinities and NaN; strided."""
    kernel = compiled()
    assert isinstance(kernel, CpuKernel), kernel
    rows = noise(2, 3, 64, 96)[..., :64]
    rows *= 10.0 ** (noise(2, 3, 64, 1, seed=1) * 3)
    rows[0, 0, :32] = 0.3
    rows[0, 1] = (rows[0, 1] * 4).round() / 2  # halfway between codes, often
    rows[1, 0, 3, 5], rows[1, 1, 40, 40], rows[1, 2, 7, 9] = torch.nan, torch.inf, -torch.inf
    groups = rows.unflatten(2, (-1, 32)).mT if axis == "token" else rows.unflatten(-1, (-1, 32))
    codes, scale, minimum = kernel.encode(groups, bits)
    wanted, *pair = quantise(groups, bits)
    assert torch.equal(codes, pack(wanted, bits))
    for got, want in zip((scale, minimum), pair, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@BITS
@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-2, 1.0, 37.0, 1e4, 3e5, 1e30])
@pytest.mark.parametrize("offset", [0.0, -3.0, 2000.0])
def test_error_bound(bits: int, size: float, offset: float) -> None:
    """From ranges below float16's smallest number to ranges far beyond its largest."""
    within_bound(noise(64, 32) * size + offset, bits)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), st.sampled_from([8, 4, 2]))
def test_error_bound_of_any_group(values: list[float], bits: int) -> None:
    within_bound(torch.tensor(values), bits)


@BITS
def test_rule_by_hand(bits: int) -> None:
    """A group whose minimum and scale are exact in float16: codes are what the rule says, halves to even."""
    levels = 2**bits - 1
    in_steps = torch.tensor([0, levels, 0.5, 1.5, 0.74, 4, 2, 1]).clamp(max=levels)
    x = in_steps * 0.5 - 2.0
    codes, scale, minimum = quantise(x, bits)
    assert (scale.item(), minimum.item()) == (0.5, -2.0)
    assert scale.dtype == minimum.dtype == torch.float16
    assert codes.tolist() == [0, levels, 0, 2, 1, min(4, levels), 2, 1]


@BITS
def test_encoding_again_with_the_stored_pair_gives_the_same_codes(bits: int) -> None:
    for size in (1e-4, 1.0, 300.0):
        codes, scale, minimum = quantise(noise(200, 32, seed=3) * size + size, bits)
        back = dequantise(codes, scale, minimum)
        pair = scale.float().unsqueeze(-1), minimum.float().unsqueeze(-1)
        again = ((back - pair[1]) / pair[0]).clamp(0, 2**bits - 1).round()
        assert torch.equal(again.to(torch.uint8), codes)


@BITS
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14159, 6.1e-5, 1e-9, 70000.0])
def test_constant_group_returns_the_stored_minimum(bits: int, value: float) -> None:
    x = torch.full((3, 16), value)
    codes, scale, minimum = quantise(x, bits)
    assert scale.eq(0).all() and codes.eq(0).all()
    stored = torch.tensor(value).clamp(-65504, 65504).half()
    assert dequantise(codes, scale, minimum).eq(stored.float()).all()


@BITS
def test_constant_group_leaves_its_packed_neighbours_alone(bits: int) -> None:
    """A NaN cast to an integer would not stay within its own bits."""
    x = noise(6, 16)
    x[::2] = 0.25
    packed = pack(quantise(x, bits)[0], bits)
    assert packed[::2].eq(0).all()
    assert torch.equal(packed[1::2], pack(quantise(x[1::2], bits)[0], bits))


@BITS
def test_range_too_small_for_float16(bits: int) -> None:
    x = 1.0 + noise(4, 16).clamp(-1, 1) * 1e-8 * 2**bits
    codes, scale, minimum = quantise(x.double(), bits)
    assert scale.eq(0).all() and codes.eq(0).all() and minimum.eq(1).all()


@BITS
def test_range_beyond_float16_stays_finite(bits: int) -> None:
    """Pairs clamp to float16's largest number instead of becoming infinite."""
    x = torch.tensor([-1e8, 0.0, 1e8, 5.0, -5.0, 1e9, -1e9, 1.0])
    codes, scale, minimum = quantise(x, bits)
    assert scale.isfinite().all() and minimum.isfinite().all()
    assert codes[5] == 2**bits - 1 and codes[6] == 0
    assert dequantise(codes, scale, minimum).isfinite().all()


@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_quantise_as_their_float32_values(bits: int, dtype: torch.dtype) -> None:
    x = noise(10, 32, dtype=torch.float64).to(dtype)
    for got, want in zip(quantise(x, bits), quantise(x.float(), bits), strict=True):
        assert torch.equal(got, want)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([8, 4, 2]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10_000))
def test_packing_loses_nothing(bits: int, rows: int, eights: int, seed: int) -> None:
    group = 8 * eights
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, group), dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    assert packed.shape == (rows, group * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits), codes)


@BITS
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_stored_groups_read_back_as_the_reference(axis: Axis, bits: int) -> None:
    rows = noise(2, 3, 48, 32, dtype=torch.float64)
    groups = held(rows, axis, bits, 16)
    want = (along_tokens if axis == "token" else along_channels)(rows, bits, 16)
    torch.testing.assert_close(read_all(groups.parts(), torch.float64), want, atol=1e-12, rtol=0)


@BITS
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_appending_in_pieces_equals_appending_at_once(axis: Axis, bits: int) -> None:
    rows = noise(2, 2, 64, 16)
    whole = held(rows, axis, bits, 8)
    pieces = empty(rows, axis, bits, 8)
    for start, stop in ((0, 0), (0, 16), (16, 24), (24, 64)):
        pieces.append(rows[:, :, start:stop])
    for name in ("codes", "scale", "minimum"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))
    assert pieces.length == 64


@BITS
def test_overwritten_rows_are_those_of_each_head(bits: int) -> None:
    """Different slots in every head and batch row; the others keep their bytes."""
    rows, new = noise(2, 2, 10, 16), noise(2, 2, 3, 16, seed=9)
    groups = held(rows, "channel", bits, 8)
    slot = torch.tensor([[[0, 9, 4], [3, 1, 2]], [[5, 6, 7], [9, 0, 8]]])
    groups.overwrite(slot, new)
    want = rows.clone()
    for b in range(2):
        for h in range(2):
            for i in range(3):
                want[b, h, slot[b, h, i]] = new[b, h, i]
    expected = held(want, "channel", bits, 8)
    for name in ("codes", "scale", "minimum"):
        assert torch.equal(getattr(groups, name), getattr(expected, name))


@BITS
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("group", [8, 16, 32])
def test_bits_a_value(axis: Axis, bits: int, group: int) -> None:
    """b + 32 / G: the codes and a float16 pair a group, counted in the bytes of the buffers."""
    groups = held(noise(1, 2, 64, 32), axis, bits, group)
    in_bytes = sum(buffer.tensor.untyped_storage().nbytes() for buffer in groups.buffers())
    assert 8 * in_bytes / (2 * 64 * 32) == bits + 32 / group


@BITS
def test_outlier_channels_want_groups_along_tokens(bits: int) -> None:
    """With a few large channels the other channels lose many times less in per-channel groups; with a few
    large tokens the other way round."""
    plain = noise(1, 1, 128, 64)
    channels, tokens = plain.clone(), plain.clone()
    channels[..., ::13] *= 30
    tokens[:, :, ::13] *= 30

    def error(rows: Tensor, axis: Axis) -> float:
        back = read_all(held(rows, axis, bits, 32).parts(), torch.float32)
        return (back - rows)[rows == plain].pow(2).mean().sqrt().item()

    assert error(channels, "channel") > 4 * error(channels, "token")
    assert error(tokens, "token") > 4 * error(tokens, "channel")


@pytest.mark.parametrize("n", [1, 7, 8, 13, 24])
def test_first_rows_of_a_part(n: int) -> None:
    rows = noise(2, 2, 24, 16)
    token, channel = held(rows, "token", 4, 8).parts(), held(rows, "channel", 4, 8).parts()
    parts: list[Part] = [Dense(rows), *token, *channel]
    for part in parts:
        assert torch.equal(part.first(n).read(torch.float32), part.read(torch.float32)[:, :, :n])
        assert part.first(n).length == n
        assert part.kv_heads == 2


def test_lengths_of_parts() -> None:
    rows = noise(1, 2, 24, 16)
    packed = held(rows, "token", 2, 8).parts()
    assert isinstance(packed[0], Packed) and packed[0].length == 24
    assert total_length([*packed, Dense(rows[:, :, :5])]) == 29
    assert empty(rows, "token", 2, 8).parts() == []
