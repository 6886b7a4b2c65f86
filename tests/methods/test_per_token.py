"""Per-token codes: slots that can be replaced one by one."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.bytes import held_bytes
from kvbench.cache.row_slots import RowSlots
from kvbench.cache.store import SlotShape
from kvbench.errors import UserError
from kvbench.kernels.parts import read_all
from kvbench.methods.per_token import PerToken
from tests.shared.reference import along_channels


def slots_of(store: PerToken, slots: int = 20) -> RowSlots:
    """Two rows, two heads, keys of 16 and values of 32 channels."""
    return store.allocate(SlotShape(2, 2, 16, 32, slots, 1, torch.float32, torch.device("cpu")))


def noise(tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 2, tokens, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_append_and_overwrite_quantise_each_token_by_itself(bits: int) -> None:
    key, value = noise(20, 16), noise(20, 32, 1)
    slots = slots_of(PerToken(bits, bits, 8))
    slots.fill(key[:, :, :12], value[:, :, :12])
    slots.append(key[:, :, 12:15], value[:, :, 12:15])
    slot = torch.tensor([[[3, 14], [0, 1]], [[7, 2], [14, 13]]])
    new_key, new_value = noise(2, 16, 2), noise(2, 32, 3)
    slots.overwrite(slot, new_key, new_value)
    for b in range(2):
        for h in range(2):
            key[b, h, slot[b, h]], value[b, h, slot[b, h]] = new_key[b, h], new_value[b, h]
    for parts, rows in ((slots.key_parts(), key), (slots.value_parts(), value)):
        want = along_channels(rows[:, :, :15], bits, 8)
        torch.testing.assert_close(read_all(parts, torch.float64), want, atol=1e-9, rtol=0)
    assert slots.length == 15


@pytest.mark.parametrize(("k_bits", "v_bits", "group"), [(8, 8, 8), (4, 4, 16), (2, 2, 16), (8, 2, 8)])
def test_bytes_by_hand(k_bits: int, v_bits: int, group: int) -> None:
    slots = slots_of(PerToken(k_bits, v_bits, group))
    slots.fill(noise(20, 16), noise(20, 32))
    rows = 2 * 2 * 20
    codes = rows * (16 * k_bits + 32 * v_bits) // 8
    scales = rows * (16 + 32) // group * 4
    held = held_bytes(slots.buffers(5))
    assert held.parts == {"codes": codes, "scales": scales}
    assert held.used == (codes + scales) * 5 / 20


def test_groups_must_divide_both_heads() -> None:
    with pytest.raises(UserError, match="group=32 does not divide the head size 16; type one of: group=8, group=16"):
        PerToken(group_size=32).check(16, 32)
    with pytest.raises(UserError, match="does not divide the head size 16"):
        PerToken(group_size=32).check(32, 16)
    PerToken(group_size=16).check(16, 32)


@pytest.mark.parametrize("settings", [{"k_bits": 5}, {"v_bits": 0}, {"group_size": 4}, {"group_size": "32"}])
def test_settings_that_cannot_be_held(settings: dict[str, object]) -> None:
    with pytest.raises(
        UserError, match=r"type (bits=8, bits=4, bits=3 or bits=2|a multiple of 8, for example group=32)"
    ):
        PerToken(**settings)
