"""KIVI's store by itself: what is quantised when, what stays in full precision, and the bytes of both."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from kvbench.cache.bytes import held_bytes
from kvbench.cache.store import SlotShape
from kvbench.errors import UserError
from kvbench.kernels.parts import Dense, Packed, read_all, total_length
from kvbench.methods.kivi import Kivi, KiviSlots
from tests.shared.reference import along_channels, along_tokens

Axis = Literal["channel", "token"]

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 16, 32


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """key [2, 2, tokens, 16] and value [2, 2, tokens, 32]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(BATCH, HEADS, tokens, KEY_DIM, generator=generator),
        torch.randn(BATCH, HEADS, tokens, VALUE_DIM, generator=generator),
    )


def empty(store: Kivi, slots: int, step: int = 1) -> KiviSlots:
    shape = SlotShape(BATCH, HEADS, KEY_DIM, VALUE_DIM, slots, step, torch.float32, torch.device("cpu"))
    return store.allocate(shape)


def filled(store: Kivi, prompt: int, total: int, steps: tuple[int, ...] = (), seed: int = 0) -> KiviSlots:
    """A prompt and then forwards of so many tokens each, of `rows(total)`, settled after each."""
    key, value = rows(total, seed)
    slots = empty(store, total, max([1, *steps]))
    slots.fill(key[:, :, :prompt], value[:, :, :prompt])
    slots.settle()
    at = prompt
    for q in steps:
        slots.append(key[:, :, at : at + q], value[:, :, at : at + q])
        at += q
        slots.settle()
    return slots


def state(slots: KiviSlots) -> tuple[int, int, int, int]:
    """(Kq, Kfp, Vq, Vfp), from the parts that a kernel would read."""

    def split(parts: list[Packed | Dense]) -> tuple[int, int]:
        return (
            sum(p.length for p in parts if isinstance(p, Packed)),
            sum(p.length for p in parts if isinstance(p, Dense)),
        )

    return (*split(slots.key_parts()), *split(slots.value_parts()))


@pytest.mark.parametrize(
    ("prompt", "steps", "want"),
    [
        (1, 0, (0, 1, 0, 1)),
        (100, 0, (0, 100, 0, 100)),
        (127, 0, (0, 127, 0, 127)),
        (128, 0, (128, 0, 0, 128)),
        (129, 0, (128, 1, 1, 128)),
        (200, 0, (128, 72, 72, 128)),
        (256, 0, (256, 0, 128, 128)),
        (200, 55, (128, 127, 127, 128)),
        (200, 56, (256, 0, 128, 128)),
        (200, 57, (256, 1, 129, 128)),
        (100, 28, (128, 0, 0, 128)),
        (100, 300, (384, 16, 272, 128)),
    ],
)
def test_state_table(prompt: int, steps: int, want: tuple[int, int, int, int]) -> None:
    """The table of methods.md at R = 128, and its neighbours."""
    slots = filled(Kivi(4, 4, 8, 128), prompt, prompt + steps, (1,) * steps)
    assert state(slots) == want


@pytest.mark.parametrize("steps", [(7, 1, 1, 10, 3), (40,), (64, 1), (16, 16, 16)])
@pytest.mark.parametrize("prompt", [5, 16, 30])
def test_steps_of_several_tokens_end_where_single_ones_do(prompt: int, steps: tuple[int, ...]) -> None:
    """Counts and every stored number: a forward may bring more tokens than the residual holds."""
    total = prompt + sum(steps)
    store = Kivi(4, 4, 8, 16)
    several, single = filled(store, prompt, total, steps), filled(store, prompt, total, (1,) * sum(steps))
    assert state(several) == state(single)
    for mine, other in ((several.key_parts, single.key_parts), (several.value_parts, single.value_parts)):
        assert torch.equal(read_all(mine(), torch.float64), read_all(other(), torch.float64))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_contents_are_the_definition(bits: int) -> None:
    """[quantised in groups | exact], in token order, at every length up to 150; k_bits and v_bits apart."""
    store = Kivi(bits, 4, 8, 24)
    key, value = rows(150)
    slots = empty(store, 150)
    slots.fill(key[:, :, :10], value[:, :, :10])
    slots.settle()
    for t in range(10, 150):
        slots.append(key[:, :, t : t + 1], value[:, :, t : t + 1])
        slots.settle()
        n = t + 1
        kq, vq = n - n % 24, max(0, n - 24)
        assert total_length(slots.key_parts()) == total_length(slots.value_parts()) == n
        if n % 10:
            continue
        wanted_key = torch.cat([along_tokens(key[:, :, :kq], bits, 8)] if kq else [], dim=2) if kq else None
        read = read_all(slots.key_parts(), torch.float64)
        if wanted_key is not None:
            torch.testing.assert_close(read[:, :, :kq], wanted_key, atol=1e-9, rtol=0)
        assert torch.equal(read[:, :, kq:], key[:, :, kq:n].double())
        read = read_all(slots.value_parts(), torch.float64)
        torch.testing.assert_close(read[:, :, :vq], along_channels(value[:, :, :vq], 4, 8), atol=1e-9, rtol=0)
        assert torch.equal(read[:, :, vq:], value[:, :, vq:n].double())


@pytest.mark.parametrize("v_axis", ["channel", "token"])
@pytest.mark.parametrize("k_axis", ["channel", "token"])
def test_each_axis_is_its_definition(k_axis: Axis, v_axis: Axis) -> None:
    """Per channel: whole residuals, grouped along tokens. Per token: all but the newest, grouped along channels.
    The rest is exact, at every length, whatever the forwards brought."""
    r, group = 16, 8
    store = Kivi(4, 2, group, r, k_axis, v_axis)
    key, value = rows(100)
    for steps in ((1,) * 90, (7, 1, 40, 16, 16, 10)):
        slots = empty(store, 100, max(steps))
        slots.fill(key[:, :, :10], value[:, :, :10])
        slots.settle()
        n = 10
        for q in steps:
            slots.append(key[:, :, n : n + q], value[:, :, n : n + q])
            assert total_length(slots.key_parts()) == total_length(slots.value_parts()) == n + q
            slots.settle()
            n += q
            for axis, bits, parts, whole in (
                (k_axis, 4, slots.key_parts(), key),
                (v_axis, 2, slots.value_parts(), value),
            ):
                quantised = n - n % r if axis == "channel" else max(0, n - r)
                along = along_tokens if axis == "channel" else along_channels
                read = read_all(parts, torch.float64)
                assert read.shape[2] == n
                assert sum(part.length for part in parts if isinstance(part, Packed)) == quantised
                if quantised:
                    want = along(whole[:, :, :quantised], bits, group)
                    torch.testing.assert_close(read[:, :, :quantised], want, atol=1e-9, rtol=0)
                assert torch.equal(read[:, :, quantised:], whole[:, :, quantised:n].double())


def test_nothing_is_quantised_twice() -> None:
    """The bytes of the prompt's codes and pairs are the same after 400 more tokens."""
    store = Kivi(2, 2, 8, 32)
    before = filled(store, 70, 470)
    after = filled(store, 70, 470, (1,) * 400)
    for mine, other, n in ((before.keys, after.keys, 64 // 8), (before.values, after.values, 70 - 32)):
        for name in ("codes", "scale", "minimum"):
            assert torch.equal(getattr(mine.groups, name)[:, :, :n], getattr(other.groups, name)[:, :, :n])
    assert (before.keys.groups.length, before.values.groups.length) == (64, 38)
    assert (after.keys.groups.length, after.values.groups.length) == (448, 438)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group", [8, 16])
def test_bytes_by_hand(bits: int, group: int) -> None:
    """Every buffer's storage against a count of groups, and b + 32 / G bits a quantised value."""
    slots_planned, residual, step = 300, 64, 5
    slots = empty(Kivi(bits, bits, group, residual), slots_planned, step)
    slots.fill(*rows(200))
    slots.settle()
    pairs = BATCH * HEADS
    key_rows, value_rows = 256, 300 - 64  # whole residuals; all but the newest R
    codes = pairs * (key_rows * KEY_DIM + value_rows * VALUE_DIM) * bits // 8
    scales = pairs * (key_rows * KEY_DIM + value_rows * VALUE_DIM) // group * (2 + 2)
    full_precision = pairs * (residual + step) * (KEY_DIM + VALUE_DIM) * 4
    held = held_bytes(slots.buffers(200))
    assert held.parts == {"codes": codes, "scales": scales, "residual": full_precision}
    assert held.held == codes + scales + full_precision
    quantised_values = pairs * (key_rows * KEY_DIM + value_rows * VALUE_DIM)
    assert 8 * (codes + scales) / quantised_values == bits + 32 / group
    # In use now: 192 of 256 key rows, 136 of 236 value rows, 8 and 64 residual rows.
    used = pairs * (192 * KEY_DIM + 136 * VALUE_DIM) * (bits + 32 / group) / 8
    used += pairs * (8 * KEY_DIM + 64 * VALUE_DIM) * 4
    assert held.used == pytest.approx(used, abs=6)


def test_short_plans_take_no_residual_they_cannot_fill() -> None:
    slots = empty(Kivi(4, 4, 8, 128), 20, 4)
    assert held_bytes(slots.buffers(0)).parts == {"residual": BATCH * HEADS * 20 * (KEY_DIM + VALUE_DIM) * 4}
    slots.fill(*rows(20))
    slots.settle()
    assert not slots.has_quantised and state(slots) == (0, 20, 0, 20)


def test_constant_tokens_and_channels() -> None:
    """No range in any group: every token reads back as stored, with no NaN in it or beside it."""
    slots = empty(Kivi(2, 2, 8, 16), 48)
    key, value = torch.full((BATCH, HEADS, 48, KEY_DIM), 0.5), torch.full((BATCH, HEADS, 48, VALUE_DIM), -2.0)
    slots.fill(key, value)
    slots.settle()
    assert state(slots) == (48, 0, 32, 16)
    assert read_all(slots.key_parts(), torch.float32).eq(0.5).all()
    assert read_all(slots.value_parts(), torch.float32).eq(-2.0).all()


def test_the_papers_axes_beat_the_other_three_at_two_bits() -> None:
    """Keys with outlier channels, values of tokens that differ in size: keys per channel with values per token
    lose less than half of any other choice at the attention output (the paper's table 2)."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 64, generator=generator) for n in (64, 288, 288))
    key[..., ::13] *= 20
    query[..., ::13] *= 0.05
    value *= 4 ** torch.randn(1, 1, 288, 1, generator=generator)
    shape = SlotShape(1, 1, 64, 64, 288, 1, torch.float32, torch.device("cpu"))

    def attended(key: Tensor, value: Tensor) -> Tensor:
        return (query.double() @ key.double().mT * 0.125).softmax(-1) @ value.double()

    exact = attended(key, value)

    def error(k_axis: Axis, v_axis: Axis) -> float:
        slots = Kivi(2, 2, 32, 32, k_axis, v_axis).allocate(shape)
        slots.fill(key, value)
        slots.settle()
        got = attended(read_all(slots.key_parts(), torch.float64), read_all(slots.value_parts(), torch.float64))
        return ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()

    mine = error("channel", "token")
    for k_axis, v_axis in (("token", "token"), ("channel", "channel"), ("token", "channel")):
        assert mine < 0.5 * error(k_axis, v_axis)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"k_bits": 3}, "bits=4"),
        ({"v_bits": 3}, "bits=4"),
        ({"k_bits": 16}, "bits=8"),
        ({"k_bits": True}, "bits=2"),
        ({"k_bits": "4"}, "bits=4"),
        ({"group_size": 12}, "group=32"),
        ({"group_size": 0}, "group=32"),
        ({"group_size": -32}, "group=32"),
        ({"group_size": 1}, "group=32"),
        ({"group_size": 32.0}, "group=32"),
        ({"group_size": True}, "group=32"),
        ({"k_axis": "tokens"}, "k_axis=token"),
        ({"v_axis": None}, "v_axis=channel"),
        ({"residual_length": 100}, "residual=128"),
        ({"residual_length": 16}, "residual=128"),
        ({"residual_length": 0}, "residual=128"),
        ({"residual_length": -32}, "residual=128"),
        ({"residual_length": None}, "residual=128"),
    ],
)
def test_settings_that_cannot_be_held(settings: dict[str, object], named: str) -> None:
    """One line each, which says what to type."""
    with pytest.raises(UserError) as error:
        Kivi(**settings)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_group_that_does_not_divide_the_head() -> None:
    """Values are grouped along channels; the line lists the sizes that fit."""
    with pytest.raises(UserError, match="group=32 does not divide the head size 80") as error:
        Kivi(group_size=32).check(80, 80)
    assert "group=8, group=16, group=40, group=80" in str(error.value)
    Kivi(group_size=16).check(80, 80)
    Kivi(group_size=32, v_axis="channel").check(80, 80)
    with pytest.raises(UserError, match="group=32 does not divide the head size 80"):
        Kivi(group_size=32, k_axis="token").check(80, 64)
    Kivi(group_size=32).check(80, 64)  # keys are grouped along tokens: their head may have any size
    with pytest.raises(UserError, match="choose another store"):
        Kivi(group_size=32).check(12, 12)
