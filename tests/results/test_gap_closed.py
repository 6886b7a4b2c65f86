"""The share of the gap between random eviction and hindsight that a rule closes."""

import numpy as np
import pytest

from kvbench.errors import UserError
from kvbench.results.gap_closed import gap_closed


def _losses(random: np.random.Generator, n: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses per window of floor, rule and ceiling; the rule closes `share` of a gap of 1 nat, on average."""
    text = random.normal(3, 1, size=n)  # how hard a window is for everyone
    gap = 1 + 0.4 * random.normal(size=n)
    return text + gap, text + (1 - share) * gap + 0.2 * random.normal(size=n), text


def test_value_is_the_ratio_of_means():
    floor, rule, ceiling = _losses(np.random.default_rng(0), 32, 0.6)
    found = gap_closed(floor, rule, ceiling)
    assert found.value == pytest.approx((floor.mean() - rule.mean()) / (floor.mean() - ceiling.mean()), rel=1e-12)
    assert found.low < found.value < found.high and found.n == 32 and found.undefined is None


@pytest.mark.parametrize(("place", "value"), [(0, 0.0), (2, 1.0)])
def test_floor_closes_nothing_and_ceiling_closes_all(place, value):
    losses = _losses(np.random.default_rng(1), 32, 0.6)
    found = gap_closed(losses[0], losses[place], losses[2])
    assert (found.value, found.low, found.high) == pytest.approx((value, value, value))


def test_a_rule_can_lie_below_the_floor_and_above_the_ceiling():
    floor, _, ceiling = _losses(np.random.default_rng(2), 32, 0.5)
    assert gap_closed(floor, floor + 1, ceiling).high < 0 and gap_closed(floor, ceiling - 1, ceiling).low > 1


@pytest.mark.parametrize(("n", "most"), [(10, 0.10), (32, 0.08), (128, 0.07)])
def test_interval_covers_the_true_share(n, most):
    random = np.random.default_rng(n)
    found = [gap_closed(*_losses(random, n, 0.6)) for _ in range(400)]
    defined = [each for each in found if each.undefined is None]
    assert len(defined) >= 395  # the gap is 1 nat in the mean, 0.4 its standard deviation
    assert np.mean([not each.low <= 0.6 <= each.high for each in defined]) <= most


def test_pairing_makes_the_interval_narrow():
    floor, rule, ceiling = _losses(np.random.default_rng(3), 64, 0.6)
    paired, unpaired = gap_closed(floor, rule, ceiling), gap_closed(floor, np.roll(rule, 1), ceiling)
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 3


def test_the_same_seed_gives_the_same_interval_in_any_order():
    losses = _losses(np.random.default_rng(4), 32, 0.6)
    assert gap_closed(*losses) == gap_closed(*(each[::-1] for each in losses))
    assert gap_closed(*losses).low != gap_closed(*losses, seed=1).low


def test_undefined_where_floor_and_ceiling_cannot_be_told_apart():
    random = np.random.default_rng(5)
    floor, ceiling = random.normal(size=(2, 32))
    found = gap_closed(floor, floor - 0.5, ceiling)
    assert (found.value, found.low, found.high) == (None, None, None)
    assert found.undefined == "floor and ceiling cannot be told apart (32 units)"
    assert gap_closed(floor, floor, floor).undefined == found.undefined


def test_undefined_where_the_ceiling_is_worse_than_the_floor():
    floor, rule, ceiling = _losses(np.random.default_rng(6), 32, 0.6)
    assert gap_closed(ceiling, rule, floor).undefined == "the ceiling is worse than the floor (32 units)"


def test_undefined_for_one_unit_and_for_losses_that_are_not_finite():
    assert gap_closed([2.0], [1.5], [1.0]).undefined == "1 unit: 2 or more are needed"
    assert (
        gap_closed([2.0, 3, 4], [1.5, np.nan, 3], [1.0, 2, 3]).undefined == "some of the 3 units have no finite value"
    )


def test_with_fewer_than_ten_units_there_is_a_value_without_an_interval():
    found = gap_closed(*_losses(np.random.default_rng(7), 9, 0.6))
    assert found.value is not None and found.low is None and found.high is None


def test_losses_on_other_units_are_refused():
    with pytest.raises(UserError, match=r"\[\[3\], \[2\], \[3\]\]"):
        gap_closed([1.0, 2, 3], [1.0, 2], [1.0, 2, 3])
