"""TurboQuant's kind of store: the codebook against numerical integration, what is held, and what an outlier costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from kvbench.cache.bytes import held_bytes
from kvbench.cache.codebook import lloyd_max
from kvbench.cache.store import SlotShape
from kvbench.errors import UserError
from kvbench.kernels.parts import read_all
from kvbench.methods.turbo import Turbo, turn, turn_back

CPU = torch.device("cpu")

# J. Max, "Quantizing for minimum distortion" (1960), table I: positive levels and mean squared error.
PUBLISHED = {
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", [3, 4])
def test_the_codebook_is_the_published_one_and_a_fixed_point_of_lloyds_rule(bits: int) -> None:
    levels = np.array(lloyd_max(bits))
    positive, error = PUBLISHED[bits]
    assert np.allclose(levels[len(levels) // 2 :], positive, atol=6e-4)
    assert np.allclose(levels, -levels[::-1], atol=1e-9)
    borders = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]
    squared = 0.0
    for level, low, high in zip(levels, borders[:-1], borders[1:], strict=True):
        mass = integrate.quad(stats.norm.pdf, low, high)[0]
        mean = integrate.quad(lambda x: x * stats.norm.pdf(x), low, high)[0] / mass
        assert mean == pytest.approx(level, abs=1e-6)
        squared += integrate.quad(lambda x, at=level: (x - at) ** 2 * stats.norm.pdf(x), low, high)[0]
    assert squared == pytest.approx(error, rel=2e-3)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_rotation_is_orthogonal(dim: int) -> None:
    x, y = torch.randn(2, 3, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn_back(turn(x)), x, atol=1e-12, rtol=0)
    torch.testing.assert_close((turn(x) * turn(y)).sum(-1), (x * y).sum(-1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("bits", [4, 3])
def test_what_is_held_is_the_nearest_level_times_the_norm(bits: int) -> None:
    """Appended and overwritten slots alike, by a loop over rows; zeros stay zeros."""
    draw = torch.Generator().manual_seed(bits)
    key, value = torch.randn(2, 2, 2, 20, 32, generator=draw) * torch.rand(2, 2, 2, 20, 1, generator=draw) * 9
    key[0, 0, 3] = 0
    slots = Turbo(bits, bits).allocate(SlotShape(2, 2, 32, 32, 20, 1, torch.float32, CPU))
    slots.fill(key[:, :, :15], value[:, :, :15])
    slot = torch.tensor([[[3, 14], [0, 1]], [[7, 2], [14, 13]]])
    slots.overwrite(slot, key[:, :, 18:], value[:, :, 18:])
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        key[b, h, slot[b, h]], value[b, h, slot[b, h]] = key[b, h, 18:].clone(), value[b, h, 18:].clone()
    levels = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    for parts, rows in ((slots.key_parts(), key), (slots.value_parts(), value)):
        held = read_all(parts, torch.float64)
        for row, got in zip(turn(rows[:, :, :15]).flatten(0, 2), held.flatten(0, 2), strict=True):
            size = (row.double() ** 2).mean().sqrt()
            shape = row.double() / size if size > 0 else row.double()
            nearest = levels[(shape[:, None] - levels).abs().argmin(-1)]
            assert (got - nearest * float(size.half())).abs().max() <= 1e-6 * size


def test_error_is_that_of_the_codebook_whatever_the_rows_are() -> None:
    """Relative squared error near the published 0.0095 and 0.0345, with an outlier channel and at any size."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 1, 400, 64, generator=draw)
    rows[..., 5] += 30
    for scale in (1e-3, 1.0, 100.0):
        slots = Turbo(4, 3).allocate(SlotShape(1, 1, 64, 64, 400, 1, torch.float32, CPU))
        slots.append(rows * scale, rows * scale)
        exact = turn(rows * scale)
        errors = [
            float((read_all(parts, torch.float32) - exact).square().sum() / exact.square().sum())
            for parts in (slots.key_parts(), slots.value_parts())
        ]
        assert 0.004 < errors[0] < 0.014 and 0.015 < errors[1] < 0.05


@pytest.mark.parametrize(("k_bits", "v_bits"), [(4, 4), (3, 3), (4, 3)])
def test_bytes_by_hand(k_bits: int, v_bits: int) -> None:
    shape = SlotShape(2, 3, 64, 96, 50, 1, torch.float32, CPU)
    slots = Turbo(k_bits, v_bits).allocate(shape)
    held = held_bytes(slots.buffers(5))
    books = {4: 4 * (16 + 15), 3: 4 * (8 + 7)}  # levels and the borders between them in float32
    codebooks = books[k_bits] + books[v_bits]
    codes, norms = 2 * 3 * 50 * (64 * k_bits + 96 * v_bits) // 8, 2 * 3 * 50 * 2 * 2
    assert held.parts == {"codes": codes, "scales": norms + codebooks}
    assert held.used == (codes + norms) * 5 / 50 + codebooks
    assert Turbo(k_bits, v_bits).planned_bytes(shape) == held.held


def test_settings_that_cannot_be_held() -> None:
    with pytest.raises(UserError, match="bits=2 for turbo; type bits=4 or bits=3"):
        Turbo(2, 2)
    with pytest.raises(UserError, match="does not divide|type a multiple of 8"):
        Turbo().check(20, 64)
