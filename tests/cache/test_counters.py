"""Counters against a list of tokens, and the device's counters against the host's."""

from __future__ import annotations

import random

import pytest
import torch

from kvbench.cache.counters import BlockCounters, CacheFull, Counters, DeviceCounters
from kvbench.cache.residual import Schedule
from kvbench.methods.kivi_captured import KiviCounters


def test_a_prompt_then_steps_by_hand() -> None:
    """A prompt of 10 of which 4 stay, evicting to 4, in steps of up to 3."""
    counters = Counters(capacity=7, step=3, evicts_to=4)
    counters.fill(kept=4, seen=10)
    assert (counters.kept, counters.evicted, counters.excess) == (4, 6, 0)
    assert counters.accept(2) == 0  # no slot is free yet
    assert (counters.written, counters.kept, counters.seen, counters.excess) == (6, 6, 12, 2)
    counters.evict(2)
    assert (counters.written, counters.free, counters.kept, counters.evicted) == (6, 2, 4, 8)
    assert counters.accept(3) == 2  # two of the three reuse a slot
    assert (counters.written, counters.free, counters.kept, counters.excess) == (7, 0, 7, 3)


def test_a_layer_that_never_evicts_has_no_excess() -> None:
    counters = Counters(capacity=20)
    counters.fill(kept=8, seen=8)
    counters.accept(12)
    assert (counters.kept, counters.evicted, counters.excess) == (20, 0, 0)


@pytest.mark.parametrize("every", [1, 6])
@pytest.mark.parametrize(("step", "evicts_to"), [(1, None), (4, None), (1, 5), (3, 5), (4, 30)])
def test_counters_follow_a_list_of_tokens(step: int, evicts_to: int | None, every: int) -> None:
    draw = random.Random(step)
    for prompt in (1, 5, 12):
        kept = prompt if evicts_to is None else min(prompt, evicts_to)
        slots: list[int | None] = list(range(prompt - kept, prompt))
        free: list[int] = []
        counters = Counters(capacity=kept + 60, step=step, evicts_to=evicts_to, evicts_every=every)
        counters.fill(kept, prompt)
        for _ in range(15):
            tokens = draw.randint(1, step)
            reused = min(tokens, len(free))
            assert counters.accept(tokens) == reused
            for _ in range(tokens):
                if free:
                    slots[free.pop()] = 1
                else:
                    slots.append(1)
            held = [i for i, token in enumerate(slots) if token is not None]
            excess = 0 if evicts_to is None else max(0, len(held) - evicts_to)
            excess = excess if excess >= every else 0
            assert (counters.written, counters.kept, counters.excess) == (len(slots), len(held), excess)
            for victim in held[:excess]:
                slots[victim] = None
                free.append(victim)
            counters.evict(counters.excess)
            assert (counters.free, counters.kept) == (len(free), len(held) - excess)


def test_room_is_refused_before_anything_is_counted() -> None:
    counters = Counters(capacity=6, step=2)
    counters.fill(kept=5, seen=9)
    with pytest.raises(CacheFull, match="max_step=3"):
        counters.check_room(3, layer=1)
    with pytest.raises(CacheFull, match=r"layer 1 holds 5 tokens of at most 6 and got 2 more.*larger max_new_tokens"):
        counters.check_room(2, layer=1)
    counters.check_room(1, layer=1)
    assert (counters.seen, counters.written) == (9, 5)


def test_free_slots_are_room() -> None:
    counters = Counters(capacity=6, step=2, evicts_to=4)
    counters.fill(kept=4, seen=4)
    counters.accept(2)
    counters.evict(counters.excess)
    counters.check_room(2, layer=0)
    assert counters.accept(2) == 2


@pytest.mark.parametrize(
    ("kept", "evicts_to", "capacity"), [(9, None, 60), (6, 6, 7), (3, 6, 7), (3, 50, 40), (6, 6, 9)]
)
@pytest.mark.parametrize("first", [0, 3])
def test_the_device_counts_as_the_host(kept: int, evicts_to: int | None, capacity: int, first: int) -> None:
    """Steps of one token, after a forward of `first` tokens that may have left free slots behind."""
    counters = Counters(capacity=capacity, step=3, evicts_to=evicts_to)
    counters.fill(kept, 12)
    if first and kept + first <= capacity:
        counters.accept(first)
        counters.evict(counters.excess)
    seen = torch.tensor(counters.seen)
    device = DeviceCounters(counters, seen, (0, counters.written), (False, True))
    for _ in range(20):
        device.accept()
        before = counters.evicted
        took_new_slot = counters.follow_step()
        assert device.lengths.tolist() == [0, counters.written, counters.written]
        assert bool(device.over) == (counters.evicted > before)
        if took_new_slot:
            assert device.newest.item() == counters.written - 1
        device.evict()
        seen.add_(1)
        assert (device.evicted.item(), seen.item()) == (counters.evicted, counters.seen)


@pytest.mark.parametrize("schedules", [(Schedule(8), Schedule(8, ring=9)), (Schedule(8, ring=12), Schedule(8))])
def test_residuals_on_the_device_follow_their_schedule(schedules: tuple[Schedule, Schedule]) -> None:
    """70 steps from an empty residual: as many are quantised as the schedule on host numbers says."""
    counters, seen, quantised = Counters(capacity=200), torch.tensor(0), [0, 0]
    device = KiviCounters(counters, seen, (0, 0), schedules)
    for step in range(70):
        device.accept()
        assert [row.item() for row in device.rows] == [
            s.row(step, q) for s, q in zip(schedules, quantised, strict=True)
        ]
        counters.follow_step()
        device.evict()
        for i, schedule in enumerate(schedules):
            if schedule.is_due(step + 1, quantised[i]):
                quantised[i] += schedule.unit
                if schedule.ring is None:
                    device.flush()
        assert device.lengths.tolist() == [*quantised, step + 1]
    assert min(quantised) >= 62


def test_a_schedule_by_hand() -> None:
    block, ring = Schedule(4), Schedule(4, ring=5)
    assert [block.is_due(length, 4) for length in (7, 8, 9)] == [False, True, True]
    assert [ring.is_due(length, 4) for length in (7, 8, 9)] == [False, False, True]
    assert (block.unit, ring.unit, block.row(6, 4), ring.row(6, 1)) == (4, 1, 2, 1)


@pytest.mark.parametrize(("kept", "first"), [(6, 0), (3, 0), (6, 3), (6, 5)])
def test_the_device_counts_blocks_as_the_host(kept: int, first: int) -> None:
    """Steps of one token, of which some are followed by a flush; before them a forward of `first` tokens."""
    counters = Counters(capacity=12, step=5, evicts_to=6, evicts_every=3)
    counters.fill(kept, 12)
    counters.accept(first)
    counters.evict(counters.excess)
    seen = torch.tensor(counters.seen)
    device, flushes = BlockCounters(counters, seen, (0, 0)), 0
    for _ in range(20):
        device.accept()
        before = counters.evicted
        took_new_slot = counters.follow_step()
        assert device.written.item() == counters.written
        if took_new_slot:
            assert device.newest.item() == counters.written - 1
        device.evict()
        if counters.evicted > before:
            device.flush()
            flushes += 1
        seen.add_(1)
        assert (device.evicted.item(), device.free.item()) == (counters.evicted, counters.free)
    assert flushes >= 5
