"""Paired intervals cover the true mean, and verdicts follow from them."""

import time

import numpy as np
import pytest
from scipy import stats

from kvbench.errors import UserError
from kvbench.results.paired import interval, intervals, unit_means, verdict, verdicts, window_means
from tests.results.simulated_truth import WINDOWS, Rates, correlated_tokens, false_rates, limit, simulate, table


def _shape(kind: str, random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Draws with mean 0."""
    if kind == "gamma":
        return random.gamma(2, size=size) - 2
    if kind == "exponential":
        return random.exponential(size=size) - 1
    return random.standard_t(3, size=size) if kind == "t3" else random.normal(size=size)


@pytest.mark.parametrize("kind", ["normal", "t3", "gamma", "exponential"])
@pytest.mark.parametrize("n", WINDOWS)
def test_interval_misses_the_mean_in_at_most_five_percent(n, kind):
    draws = _shape(kind, np.random.default_rng([n, len(kind)]), (2_000, n))
    for sign in (1, -1):
        _, low, high = intervals(sign * draws)
        assert ((low > 0) | (high < 0)).mean() <= limit(2_000)


def test_plain_t_misses_skewed_differences_too_often():
    """The reason for the correction: this fails once plain t suffices."""
    draws = _shape("exponential", np.random.default_rng(0), (2_000, 10))
    half = stats.t.ppf(0.975, 9) * stats.sem(draws, axis=1)
    assert (np.abs(draws.mean(1)) > half).mean() > limit(2_000, 0.9999)


def test_interval_without_skew_is_the_t_interval():
    values = np.array([-3.0, -1, 0, 1, 3]) + 0.5
    expected = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    assert interval(values) == pytest.approx(expected, rel=1e-12)


def test_interval_widens_towards_the_long_tail_only():
    values = np.array([0.0, 0.1, 0.2, 0.1, 0.0, 0.2, 0.1, 0.1, 0.2, 2.0])
    low, high = interval(values)
    t_low, t_high = stats.t.interval(0.95, 9, values.mean(), stats.sem(values))
    assert low == pytest.approx(t_low, rel=1e-12) and high > t_high + 0.1
    assert interval(-values) == pytest.approx((-high, -low), rel=1e-12)


def test_interval_does_not_depend_on_the_order_of_the_units():
    values = np.random.default_rng(1).normal(size=33)
    assert interval(values) == interval(values[::-1]) == interval(np.random.default_rng(2).permutation(values))


def test_interval_of_one_unit_is_undefined():
    assert interval([0.1]) is None and interval([]) is None


def test_interval_of_equal_units_has_no_width():
    assert interval([0.25] * 12) == (0.25, 0.25)


def test_interval_of_two_units_is_the_t_interval():
    assert interval([0.0, 1.0]) == pytest.approx(stats.t.interval(0.95, 1, 0.5, 0.5))


def _spread(mean: float, deviation: float, n: int) -> np.ndarray:
    """Symmetric differences with exactly this mean and standard deviation."""
    values = np.linspace(-1, 1, n)
    return mean + deviation * values / values.std(ddof=1)


@pytest.mark.parametrize(
    ("mean", "deviation", "n", "kind", "shows_loss"),
    [
        (0.0, 0.01, 32, "within_margin", False),
        (-0.05, 0.01, 32, "within_margin", False),
        (0.005, 0.005, 32, "within_margin", True),
        (0.009, 0.01, 32, "worse", True),
        (0.05, 0.02, 32, "worse", True),
        (0.005, 0.05, 32, "not_enough_data", False),
        (0.5, 0.01, 9, "not_enough_data", False),
        (0.0, 0.0, 9, "not_enough_data", False),
        (0.5, 0.01, 10, "worse", True),
        (0.0, 0.0, 10, "within_margin", False),
    ],
)
def test_verdict_follows_from_the_interval(mean, deviation, n, kind, shows_loss):
    values = _spread(mean, deviation, n)
    found = verdict(values)
    assert (found.kind, found.shows_loss, found.n) == (kind, shows_loss, n)
    assert (found.low, found.high) == interval(values)
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert (found.needed is None) == (kind != "not_enough_data")


def test_less_data_never_gives_a_verdict_that_more_data_withholds():
    kinds = [verdict(_spread(0.002, 0.03, n)).kind for n in (8, 10, 16, 32, 64, 128, 256)]
    first = kinds.index("within_margin")
    assert first > 2 and set(kinds[:first]) == {"not_enough_data"} and set(kinds[first:]) == {"within_margin"}


def test_a_wider_margin_is_easier_to_keep():
    values = _spread(0.02, 0.01, 32)
    assert verdict(values).kind == "worse" and verdict(values, margin=0.05).kind == "within_margin"


@pytest.mark.parametrize("mean", [-0.01, 0.0, 0.01, 0.03])
def test_as_many_windows_as_needed_give_a_verdict_about_four_times_in_five(mean):
    random = np.random.default_rng(3)
    needed = verdict(_spread(mean, 0.04, 9)).needed
    draws = mean + 0.04 * random.normal(size=(400, needed))
    decided = np.mean([each.kind != "not_enough_data" for each in verdicts(list(draws))])
    assert 0.75 < decided < 0.9


def test_needed_exceeds_the_number_at_hand():
    random = np.random.default_rng(4)
    for found in verdicts([random.exponential(0.02, size=n) - 0.015 for n in random.integers(2, 60, size=500)]):
        assert found.needed is None or found.needed >= 10
        assert found.needed is None or found.needed > found.n


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (_spread(0.0, 0.04, 8), "not enough data (8 windows; about 130 needed)"),
        (_spread(1.0, 0.1, 8), "not enough data (8 windows; at least 10 needed)"),
        ([0.1], "not enough data (1 window; at least 10 needed)"),
        ([], "not enough data (0 windows; at least 10 needed)"),
        ([0.1, np.nan, np.inf], "no verdict (3 windows, some without a finite difference)"),
        (_spread(0.05, 0.02, 32), "worse by 0.05 nats (32 windows; 95% interval +0.0428 to +0.0572)"),
        (_spread(-0.001, 0.01, 32), "within the margin of 0.01 nats (32 windows; 95% interval -0.00461 to +0.00261)"),
        (
            _spread(0.005, 0.005, 32),
            "within the margin of 0.01 nats, with a loss of 0.005 nats (32 windows; 95% interval +0.0032 to +0.0068)",
        ),
    ],
)
def test_text_states_verdict_and_numbers(values, text):
    assert verdict(values).text() == text


def test_text_names_the_unit():
    assert verdict([0.1] * 3, unit="document").text() == "not enough data (3 documents; at least 10 needed)"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_difference_that_is_not_finite_gives_no_verdict(bad):
    found = verdict([*_spread(0.05, 0.01, 31), bad])
    assert found.kind == "not_enough_data" and found.needed is None and np.isnan(found.mean)
    assert verdict(_spread(0.05, 0.01, 31)).kind == "worse"


@pytest.mark.parametrize("margin", [0, -0.01, np.nan, np.inf])
def test_a_margin_that_is_not_above_zero_is_refused(margin):
    with pytest.raises(UserError, match="give nats above 0"):
        verdict([0.1] * 12, margin)


def test_values_of_tokens_are_refused_as_units():
    with pytest.raises(UserError, match="window_means"):
        verdict(np.zeros((12, 128)))


def test_verdicts_equal_one_verdict_after_the_other():
    random = np.random.default_rng(5)
    values = [random.normal(0.01, 0.02, size=n) for n in (32, 8, 32, 10, 1, 128)]
    assert [str(each) for each in verdicts(values)] == [str(verdict(each)) for each in values]


def test_ten_thousand_verdicts_take_under_a_second():
    random = np.random.default_rng(6)
    values = [random.normal(0.01, 0.02, size=n) for n in random.choice([8, 10, 32, 128], size=10_000)]
    start = time.process_time()
    verdicts(values)
    assert time.process_time() - start < 1


def test_window_means_average_the_tokens_of_a_window():
    assert window_means([[1.0, 2, 3], [4, 5, 9]]).tolist() == [2, 6]


@pytest.mark.parametrize("shape", [(3,), (3, 0), (2, 3, 4)])
def test_window_means_refuse_other_shapes(shape):
    with pytest.raises(UserError, match=r"\[windows, tokens\]"):
        window_means(np.zeros(shape))


def test_unit_means_count_a_document_once():
    labels, means = unit_means([1.0, 2, 3, 10], ["b", "b", "b", "a"])
    assert labels == ("b", "a") and means.tolist() == [2, 10]


def test_unit_means_need_a_label_for_each_value():
    with pytest.raises(UserError, match="2 labels"):
        unit_means([1.0, 2, 3], ["a", "b"])


def test_correlated_tokens_as_units_give_false_verdicts():
    """The simulation detects the fault that windows as units avoid."""
    tokens = correlated_tokens(np.random.default_rng(7), 400 * 10, "normal").reshape(400, 10, -1)
    by_token = verdicts(list(tokens.reshape(400, -1)))
    by_window = verdicts(list(tokens.mean(axis=2)))
    assert np.mean([each.kind == "worse" for each in by_token]) > 0.15
    assert np.mean([each.kind == "worse" for each in by_window]) <= limit(400)


def test_windows_of_one_document_as_units_give_false_verdicts():
    random = np.random.default_rng(8)
    values = np.repeat(random.normal(size=(400, 12)), 8, axis=1) + 0.3 * random.normal(size=(400, 96))
    labels = np.repeat(np.arange(12), 8).tolist()
    by_document = verdicts([unit_means(each, labels)[1] for each in values])
    assert np.mean([each.kind == "worse" for each in verdicts(list(values))]) > 0.15
    assert np.mean([each.kind == "worse" for each in by_document]) <= limit(400)


def _assert_errors_kept(found: list[Rates], reports: int) -> None:
    text = table(found, reports)
    for each in found:
        assert each.family <= limit(reports), text
        for false in false_rates(each):
            assert false is None or (false.mean() <= limit(reports) and false.max() <= limit(reports, 0.999)), text
        if each.windows < 10:
            assert each.worse.max() == each.within.max() == 0, text


def test_simulated_truth():
    reports = 100
    found = simulate((8, 10, 32), reports)
    _assert_errors_kept(found, reports)
    by_case = {(each.windows, each.truth): each for each in found}
    assert by_case[32, 0.02].worse.mean() > 0.5 and by_case[32, 0.0].within.mean() > 0.4  # and verdicts are given


@pytest.mark.slow
def test_simulated_truth_of_500_reports():
    found = simulate(WINDOWS, 500)
    print(table(found, 500))
    _assert_errors_kept(found, 500)
