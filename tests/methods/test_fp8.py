"""8-bit floats: one scale a head, fixed by the prompt, clamped; slots that can be replaced."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.bytes import held_bytes
from kvbench.cache.store import SlotShape
from kvbench.kernels import REFERENCE
from kvbench.kernels.parts import read_all
from kvbench.kernels.prefill import Scoring
from kvbench.methods.fp8 import Fp8, Fp8Slots


def slots_of(slots: int = 20, dtype: torch.dtype = torch.float32) -> Fp8Slots:
    return Fp8().allocate(SlotShape(2, 2, 16, 32, slots, 1, dtype, torch.device("cpu")))


def e4m3() -> torch.Tensor:
    """All finite numbers of the format, from its definition: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    positive = [m / 8 * 2**-6 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor([*positive, *(-x for x in positive)], dtype=torch.float64)


def test_what_is_held_is_the_nearest_8_bit_float_under_the_heads_scale() -> None:
    draw = torch.Generator().manual_seed(0)
    size = torch.tensor([[1e-4, 1.0], [300.0, 5000.0]]).view(2, 2, 1, 1)
    key, value = (torch.randn(2, 2, 20, dim, generator=draw) * size for dim in (16, 32))
    slots = slots_of()
    slots.fill(key[:, :, :15], value[:, :, :15])
    slot = torch.tensor([[[3, 14], [0, 1]], [[7, 2], [14, 13]]])
    slots.overwrite(slot, key[:, :, 18:], value[:, :, 18:])
    for parts, rows, scale in (
        (slots.key_parts(), key, slots.key_scale),
        (slots.value_parts(), value, slots.value_scale),
    ):
        largest = rows[:, :, :15].abs().amax((2, 3), keepdim=True) / scale
        assert ((largest <= 448) & (largest >= 224)).all() and (scale.log2() % 1 == 0).all()
        for b, h in ((b, h) for b in range(2) for h in range(2)):
            rows[b, h, slot[b, h]] = rows[b, h, 18:].clone()
        got = read_all(parts, torch.float64)
        exact = (rows[:, :, :15].double() / scale).clamp(-448, 448)
        distance = (exact.unsqueeze(-1) - e4m3()).abs().amin(-1)
        torch.testing.assert_close((got - exact).abs(), distance, atol=1e-12, rtol=0)


def test_later_tokens_beyond_the_prompts_range_are_clamped_and_the_scale_stays() -> None:
    slots = slots_of()
    slots.fill(torch.ones(2, 2, 3, 16), torch.ones(2, 2, 3, 32))
    before = slots.key_scale.clone()
    slots.append(torch.full((2, 2, 1, 16), 1e9), torch.full((2, 2, 1, 32), -1e9))
    assert torch.equal(slots.key_scale, before)
    assert (read_all(slots.key_parts(), torch.float32)[:, :, 3] == 448).all()
    assert (read_all(slots.value_parts(), torch.float32)[:, :, 3] == -448).all()


def test_a_prompt_of_zeros() -> None:
    slots = slots_of()
    slots.fill(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 32))
    assert (slots.key_scale == 1).all() and (read_all(slots.key_parts(), torch.float32) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_query_and_output_carry_the_scales_exactly(dtype: torch.dtype) -> None:
    """Rows that e4m3 holds exactly: attention over the store is attention over the rows."""
    draw = torch.Generator().manual_seed(1)
    key, value = (torch.randint(-8, 9, (2, 2, 12, dim), generator=draw) / 4 for dim in (16, 32))
    key, value = key * torch.tensor([1.0, 16.0]).view(1, 2, 1, 1), value * 2.0**-7
    query = torch.randn(2, 6, 1, 16, generator=draw).to(dtype)
    slots = slots_of(dtype=dtype)
    slots.fill(key.to(dtype), value.to(dtype))
    got, _ = REFERENCE.attend(slots.transform_query(query), slots.key_parts(), slots.value_parts(), Scoring(0.25))
    got = slots.restore_output(got)
    probabilities = (query.double() @ key.double().repeat_interleave(3, 1).mT * 0.25).softmax(-1)
    want = probabilities @ value.double().repeat_interleave(3, 1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=1e-6 if dtype == torch.float32 else 2e-4, rtol=8e-3)


def test_bytes_by_hand() -> None:
    held = held_bytes(slots_of(50).buffers(5))
    assert held.parts == {"codes": 2 * 2 * 50 * (16 + 32), "scales": 2 * 2 * 2 * 4}
    assert held.used == 2 * 2 * 5 * (16 + 32) + 2 * 2 * 2 * 4
