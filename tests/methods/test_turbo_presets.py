"""vLLM's TurboQuant presets: what a slot holds, by a loop over rows, its bytes, and keys less their mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.cache.bytes import held_bytes
from kvbench.cache.codebook import lloyd_max
from kvbench.cache.store import SlotShape
from kvbench.errors import UserError
from kvbench.kernels import REFERENCE, choose
from kvbench.kernels.parts import read_all
from kvbench.kernels.prefill import Scoring
from kvbench.methods.turbo_presets import PRESETS, TurboPreset

CPU = torch.device("cpu")
D = 64
NAMES = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
SLOT_BYTES = dict(zip(PRESETS, (196, 134, 118, 102), strict=True))


def rows(tokens: int, dim: int = D, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 2, tokens, dim, generator=draw) * torch.rand(2, 2, tokens, 1, generator=draw) * 5
    drawn[..., 3] += 9
    return drawn


def shape_of(slots: int, dim: int = D, heads: int = 2, batch: int = 2) -> SlotShape:
    return SlotShape(batch, heads, dim, dim, slots, 1, torch.float32, CPU)


def slow_key(key: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """One key as it is read, in the model's basis, and the matrix that turns it: float64 [D] and [D, D]."""
    key = key.double()
    if bits == 8:
        return key.float().clamp(-448, 448).to(torch.float8_e4m3fn).double(), torch.eye(len(key), dtype=torch.float64)
    signs = [[(-1) ** (i & j).bit_count() for j in range(len(key))] for i in range(len(key))]
    matrix = torch.tensor(signs, dtype=torch.float64) / len(key) ** 0.5
    norm = math.sqrt(sum(float(x) ** 2 for x in key))
    levels = [level / math.sqrt(len(key)) for level in lloyd_max(bits)]
    nearest = torch.tensor([min(levels, key=lambda level, at=float(x): abs(at - level)) for x in matrix @ key / norm])
    nearest = nearest.double()
    return matrix @ (norm * nearest / nearest.norm()), matrix


def slow_value(value: Tensor, bits: int) -> Tensor:
    """One value as it is read: codes against the unrounded scale, halves up."""
    low, high, levels = float(value.min()), float(value.max()), 2**bits - 1
    scale = max((high - low) / levels, 1e-8)
    codes = [min(levels, math.floor((float(x) - low) / scale + 0.5)) for x in value]
    held = torch.tensor([scale, low]).half().double()
    return torch.tensor(codes, dtype=torch.float64) * held[0] + held[1]


@pytest.mark.parametrize(("k_bits", "v_bits"), PRESETS, ids=NAMES)
@pytest.mark.parametrize("center", [False, True])
def test_rows_that_are_read_are_those_of_the_definition(k_bits: int, v_bits: int, center: bool) -> None:
    """Appended and overwritten ones. The held norm is rounded to float16: one part in 2,000."""
    key, value, new = rows(15), rows(15, seed=1), rows(2, seed=2)
    slots = TurboPreset(k_bits, v_bits, center).allocate(shape_of(20))
    slots.fill(key[:, :, :12], value[:, :, :12])
    slots.append(key[:, :, 12:], value[:, :, 12:])
    mean = key[:, :, :12].mean(2, keepdim=True) if center else torch.zeros(2, 2, 1, D)
    slot = torch.tensor([[[3, 14], [0, 1]], [[7, 2], [14, 13]]])
    slots.overwrite(slot, new, new + 1)
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        key[b, h, slot[b, h]], value[b, h, slot[b, h]] = new[b, h], new[b, h] + 1
    keys, values = read_all(slots.key_parts(), torch.float64), read_all(slots.value_parts(), torch.float64)
    for at in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(15)).tolist():
        b, h, t = at
        want, matrix = slow_key(key[b, h, t] - mean[b, h, 0], k_bits)
        got = matrix @ keys[b, h, t]
        assert (got - (want + mean[b, h, 0])).norm() < 1e-3 * (key[b, h, t].norm() + mean[b, h, 0].norm())
        torch.testing.assert_close(values[b, h, t], slow_value(value[b, h, t], v_bits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("k_bits", "v_bits"), PRESETS, ids=NAMES)
def test_bytes_a_token_are_vllm_s_slot(k_bits: int, v_bits: int) -> None:
    """At head size 128, against 2 x 128 x 2 = 512; and what is held is what the formula says."""
    store = TurboPreset(k_bits, v_bits)
    one, two = (store.planned_bytes(shape_of(slots, 128, heads=1, batch=1)) for slots in (100, 101))
    assert two - one == SLOT_BYTES[k_bits, v_bits]
    for center in (False, True):
        centred, shape = TurboPreset(k_bits, v_bits, center), shape_of(50, 96, heads=3)
        held = held_bytes(centred.allocate(shape).buffers(5))
        assert held.held == centred.planned_bytes(shape) == store.planned_bytes(shape) + center * 2 * 3 * 96 * 4


@pytest.mark.parametrize(("k_bits", "v_bits"), PRESETS, ids=NAMES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_the_compiled_kernel_reads_the_presets(k_bits: int, v_bits: int, dim: int) -> None:
    kernel, scoring = choose(CPU, torch.float32, "cpu"), Scoring(dim**-0.5, None, None, None)
    slots = TurboPreset(k_bits, v_bits).allocate(shape_of(704, dim))
    slots.fill(rows(700, dim), rows(700, dim, 1))
    query = torch.randn(2, 6, 1, dim, generator=torch.Generator().manual_seed(3))
    parts = slots.key_parts(), slots.value_parts()
    assert kernel.refusal(query, *parts) is None
    want = REFERENCE.attend(query.double(), *parts, scoring)[0]
    assert (kernel.attend(query, *parts, scoring)[0] - want).abs().max() < 2e-5 * want.abs().max()


def test_a_mean_of_keys_leaves_the_compiled_kernel_with_its_reason() -> None:
    slots = TurboPreset(4, 4, center=True).allocate(shape_of(20))
    slots.fill(rows(12), rows(12))
    kernel = choose(CPU, torch.float32, "cpu")
    reason = kernel.refusal(torch.zeros(2, 2, 1, D), slots.key_parts(), slots.value_parts())
    assert reason == "the compiled kernel does not read rows that are a sum of several parts"


@pytest.mark.parametrize(("k_bits", "v_bits"), PRESETS[1:], ids=NAMES[1:])
def test_centring_takes_away_what_all_keys_have_in_common(k_bits: int, v_bits: int) -> None:
    """Keys with one large common vector: the error of q . k falls to a tenth or less."""
    draw = torch.Generator().manual_seed(0)
    key = torch.randn(2, 2, 200, D, generator=draw) + 30 * torch.randn(2, 2, 1, D, generator=draw)
    query, errors = torch.randn(2, 2, 1, D, generator=draw), []
    for center in (False, True):
        slots = TurboPreset(k_bits, v_bits, center).allocate(shape_of(200))
        slots.fill(key, key)
        scores = slots.transform_query(query) @ read_all(slots.key_parts(), torch.float32).mT
        errors.append(float((scores - query @ key.mT).std()))
    assert errors[1] < errors[0] / 10


def test_settings_that_are_no_preset() -> None:
    with pytest.raises(UserError, match="k_bits=4 with v_bits=3 is none of vLLM's TurboQuant presets; type store="):
        TurboPreset(4, 3)
    with pytest.raises(UserError, match="center=1 for this store; type center=true"):
        TurboPreset(4, 4, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="divide|multiple of 8"):
        TurboPreset().check(20, 64)
